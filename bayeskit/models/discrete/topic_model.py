"""Latent Dirichlet allocation with exact evidence for small corpora, alignment of topics, and word counts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit.core.inputs import as_numbers, real_number, whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError
from bayeskit.models.discrete.inputs import digits_of, log_dirichlet_moment
from bayeskit.models.discrete.permutations.distributions import nearest_permutation

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LatentDirichletAllocation", "align_topics", "count_words", "plot_topics"]


#: Maximum number of enumerated assignments of topics to words.
_MAX_ASSIGNMENTS = 1 << 16
#: Maximum number of alignment rounds.
_ROUNDS = 20
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")


class LatentDirichletAllocation:
    r"""Latent Dirichlet allocation: documents are mixtures of topics, topics are distributions over words.

    Topics are :math:`\phi_k \sim \mathrm{Dirichlet}(\eta)`, topic proportions of a document are
    :math:`\theta_d \sim \mathrm{Dirichlet}(\alpha)`. Each word :math:`w` of document :math:`d` has probability
    :math:`\sum_k \theta_{dk} \phi_{kw}` after summing out its topic.

    The labels of topics are not identified and can switch between and within chains; :func:`align_topics` relabels the
    draws. :func:`count_words` computes counts from texts. Raises ``SettingsError`` if ``num_topics`` is less than 1,
    ``num_words`` less than 2, or a concentration not positive.

    Parameters
    ----------
    num_topics : int
    num_words : int
        Size of the vocabulary, at least 2.
    concentration : float, default 0.5
        :math:`\alpha` for the topic proportions, positive.
    word_concentration : float, default 0.5
        :math:`\eta` for the word probabilities, positive.

    References
    ----------
    Blei, D. M., Ng, A. Y., Jordan, M. I. (2003). Latent Dirichlet allocation. JMLR 3, 993-1022.

    Griffiths, T. L., Steyvers, M. (2004). Finding scientific topics. PNAS 101, 5228-5235.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.topic_model import LatentDirichletAllocation
    >>> model = LatentDirichletAllocation(num_topics=2, num_words=3)
    >>> round(model.log_evidence(torch.tensor([[2, 0, 1], [0, 2, 0]])), 4)
    -5.991
    """

    #: Factors that are normalized log probabilities of data.
    normalised_factors = frozenset({"words"})

    def __init__(
        self, num_topics: int, num_words: int, concentration: float = 0.5, word_concentration: float = 0.5
    ) -> None:
        self.num_topics = whole_number("num_topics", num_topics, 1)
        self.num_words = whole_number("num_words", num_words, 2)
        self.concentration = real_number("concentration", concentration, "(0, inf)")
        self.word_concentration = real_number("word_concentration", word_concentration, "(0, inf)")

    def model(self, counts: Tensor) -> None:
        """Pyro model with continuous sites ``topics``, ``(num_topics, num_words)``, and ``proportions``.

        Site ``proportions`` has shape ``(documents, num_topics)``. The likelihood is for words in a known order, so it
        has no multinomial coefficients. ``counts`` (tensor or array): word counts per document, ``(documents,
        num_words)``, integer or floating-point. Raises ``ShapeError`` if the shape is not ``(documents, num_words)``,
        or there is no document; ``DataError`` if counts are not non-negative whole numbers.
        """
        counts = self._checked(counts)
        dtype = counts.dtype if counts.is_floating_point() else torch.get_default_dtype()
        like = torch.ones((), dtype=dtype, device=counts.device)
        words = (like * self.word_concentration).expand(self.num_topics, self.num_words)
        topics = pyro.sample("topics", dist.Dirichlet(words).to_event(1))
        own = (like * self.concentration).expand(len(counts), self.num_topics)
        proportions = pyro.sample("proportions", dist.Dirichlet(own).to_event(1))
        pyro.factor("words", self.log_likelihood(topics, proportions, counts))

    def log_likelihood(self, topics: Tensor, proportions: Tensor, counts: Tensor) -> Tensor:
        """Return the log probability of all words with their topics summed out, ``(*batch)``.

        ``topics``: word probabilities of each topic, ``(*batch, num_topics, num_words)``. ``proportions``: topic
        proportions of each document, ``(*batch, documents, num_topics)``. ``counts``: ``(documents, num_words)``.
        """
        counts = as_numbers("counts", counts).to(topics)
        probability = proportions @ topics
        # Absent words may have probability zero, where the derivative of the logarithm is not finite.
        return (counts * torch.where(counts > 0, probability, 1.0).log()).sum((-1, -2))

    def log_evidence(self, counts: Tensor) -> float:
        """Return the exact log evidence by enumeration of the topics of all words.

        Given these topics, proportions and word probabilities are integrated out in closed form. The number of
        assignments is ``num_topics`` to the power of the number of words, so this is feasible for about a dozen words.
        Raises ``ShapeError`` or ``DataError`` as in :meth:`model`; ``SettingsError`` if there are more than 65,536
        assignments.
        """
        counts = self._checked(counts)
        document, word = self._tokens(counts)
        size = self.num_topics ** len(word)
        if size > _MAX_ASSIGNMENTS:
            raise SettingsError(
                f"{len(word)} words have {size} assignments of topics, more than the limit of {_MAX_ASSIGNMENTS} for "
                "enumeration; use fewer words, or estimate the evidence with bayeskit.inference.evidence.smc of "
                "Target.from_pyro(model.model, counts)"
            )
        topic = digits_of(size, self.num_topics, len(word), counts.device)
        one_hot = torch.nn.functional.one_hot(topic, self.num_topics).double()
        of_documents = torch.nn.functional.one_hot(document, len(counts)).double()
        of_words = torch.nn.functional.one_hot(word, self.num_words).double()
        in_documents = torch.einsum("atk,td->adk", one_hot, of_documents)
        in_topics = torch.einsum("atk,tw->akw", one_hot, of_words)
        log_joint = _polya(in_documents, self.concentration) + _polya(in_topics, self.word_concentration)
        return float(log_joint.logsumexp(0))

    def _tokens(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return the document index and word index of each token."""
        document, word = counts.nonzero(as_tuple=True)
        repeats = counts[document, word].long()
        return document.repeat_interleave(repeats), word.repeat_interleave(repeats)

    def _checked(self, counts: Tensor) -> Tensor:
        counts = as_numbers("counts", counts)
        counts = counts.long() if counts.dtype == torch.bool else counts
        if counts.dim() != 2 or counts.shape[1] != self.num_words or not len(counts):
            raise ShapeError(f"counts have shape {tuple(counts.shape)}; they must be (documents, {self.num_words})")
        if not bool(((counts >= 0) & (counts == counts.round()) & (counts < torch.inf)).all()):
            raise DataError("counts must be whole numbers, none of them negative")
        return counts


def _polya(counts: Tensor, concentration: float) -> Tensor:
    """Return the Dirichlet-categorical log probability of ordered draws: counts ``(*batch, n, m)`` to ``(*batch)``."""
    return log_dirichlet_moment(counts, counts.new_full(counts.shape[-1:], concentration)).sum(-1)


def align_topics(values: Mapping[str, Tensor], reference: Tensor | None = None) -> dict[str, Tensor]:
    """Relabel the topics of every draw to a common order.

    Each draw is permuted to minimize the Hellinger distance of its topics to a reference. The reference is then
    replaced by the mean of the permuted draws, and the procedure is repeated until no permutation changes (at most 20
    rounds). Use it for plots and tables of single topics; predictions and evidence do not depend on the order. Chains
    in different modes remain different after alignment.

    Parameters
    ----------
    values : mapping of str to Tensor
        Draws, such as ``draws.values()``: "topics", ``(*batch, num_topics, num_words)``, and optionally
        "proportions", ``(*batch, documents, num_topics)``.
    reference : Tensor, optional
        Initial reference topics, ``(num_topics, num_words)``; default the last draw.

    Returns
    -------
    dict of str to Tensor
        All values, with topics and proportions permuted.

    Raises
    ------
    DataError
        If ``values`` have no "topics".
    ShapeError
        If the shapes of topics, proportions and reference do not match.

    References
    ----------
    Stephens (2000), as for :func:`~bayeskit.models.discrete.mixtures.relabel`.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.topic_model import align_topics
    >>> topics = torch.tensor([[[0.8, 0.2], [0.1, 0.9]], [[0.2, 0.8], [0.7, 0.3]]])  # two draws
    >>> align_topics({"topics": topics}, reference=topics[0])["topics"][1]
    tensor([[0.7000, 0.3000],
            [0.2000, 0.8000]])
    """
    if "topics" not in values:
        raise DataError(f"values have no 'topics', only {', '.join(values) or 'nothing'}; give draws.values()")
    topics, proportions = values["topics"], values.get("proportions")
    if topics.dim() < 2:
        raise ShapeError(f"topics have shape {tuple(topics.shape)}; give (*batch, num_topics, num_words)")
    count, batch = topics.shape[-2], topics.shape[:-2]
    if proportions is not None and (proportions.shape[-1] != count or proportions.shape[:-2] != batch):
        raise ShapeError(
            f"proportions have shape {tuple(proportions.shape)}, and topics {tuple(topics.shape)}; the first must be "
            f"{(*batch, 'documents', count)}"
        )
    flat = topics.reshape(-1, *topics.shape[-2:])
    centre = flat[-1] if reference is None else as_numbers("reference", reference).to(flat)
    if centre.shape != flat.shape[1:]:
        raise ShapeError(f"reference has shape {tuple(centre.shape)}; give {tuple(flat.shape[1:])}")
    order = torch.full((len(flat), count), -1, device=flat.device)
    for _ in range(_ROUNDS):
        found = nearest_permutation(torch.einsum("kw,sjw->skj", centre.sqrt(), flat.sqrt()))
        if bool((found == order).all()):
            break
        order = found
        centre = flat.gather(1, order.unsqueeze(-1).expand_as(flat)).mean(0)
    order = order.reshape(*batch, count)
    aligned = {**values, "topics": topics.gather(-2, order.unsqueeze(-1).expand_as(topics))}
    if proportions is not None:
        aligned["proportions"] = proportions.gather(-1, order.unsqueeze(-2).expand_as(proportions))
    return aligned


def count_words(
    texts: Sequence[str], *, min_count: int = 1, stop_words: Collection[str] = ()
) -> tuple[Tensor, tuple[str, ...]]:
    """Count words in texts.

    A word is a sequence of letters and digits with inner apostrophes and hyphens. Case is ignored. Raises ``DataError``
    if an item is not a string, or the vocabulary has fewer than two words.

    Parameters
    ----------
    texts : sequence of str
        One text per document.
    min_count : int, default 1
        Minimum total count of a word over all texts.
    stop_words : collection of str, optional
        Words to exclude.

    Returns
    -------
    counts : Tensor
        ``(documents, words)``, int64.
    vocabulary : tuple of str
        The words, in alphabetical order.

    Examples
    --------
    >>> from bayeskit.models.discrete.topic_model import count_words
    >>> count_words(["The cat sat on the mat.", "The dog didn't."], stop_words=["the", "on"])
    (tensor([[1, 0, 0, 1, 1],
            [0, 1, 1, 0, 0]]), ('cat', "didn't", 'dog', 'mat', 'sat'))
    """
    least = whole_number("min_count", min_count, 1)
    texts = [texts] if isinstance(texts, str) else list(texts)
    for i, text in enumerate(texts):
        if not isinstance(text, str):
            raise DataError(f"text {i} is of type {type(text).__name__}; give a sequence of strings, one a document")
    found = [Counter(word.group().lower() for word in _WORD.finditer(text)) for text in texts]
    dropped = {word.lower() for word in stop_words}
    total = sum(found, Counter())
    vocabulary = tuple(sorted(word for word, count in total.items() if count >= least and word not in dropped))
    if len(vocabulary) < 2:
        raise DataError(
            f"the texts have {len(vocabulary)} words to count; use longer texts, a smaller min_count or fewer "
            "stop_words"
        )
    return torch.tensor([[words[word] for word in vocabulary] for words in found]), vocabulary


def plot_topics(
    topics: Tensor, vocabulary: Sequence[str], axes: Sequence[Axes] | None = None, *, num_words: int = 8
) -> Sequence[Axes]:
    """Plot the most probable words of each topic.

    Raises ``ShapeError`` if the number of words is not the size of the vocabulary, or the number of axes not the number
    of topics.

    Parameters
    ----------
    topics : Tensor
        ``(*batch, num_topics, words)``; the mean over the batch is plotted, so align draws first.
    vocabulary : sequence of str
    axes : sequence of Axes, optional
        One per topic; default: a new figure.
    num_words : int, default 8
        Number of words per topic.

    Examples
    --------
    >>> import torch
    >>> from bayeskit.models.discrete.topic_model import plot_topics
    >>> axes = plot_topics(torch.tensor([[0.6, 0.3, 0.1], [0.1, 0.1, 0.8]]), ["cat", "dog", "tax"], num_words=2)
    >>> [label.get_text() for label in axes[0].get_yticklabels()]
    ['cat', 'dog']
    """
    from bayeskit.core.plots import BLUE

    topics = as_numbers("topics", topics).detach().cpu()
    if topics.dim() < 2 or topics.shape[-1] != len(vocabulary):
        raise ShapeError(f"topics have shape {tuple(topics.shape)}; give (*batch, num_topics, {len(vocabulary)})")
    count = min(whole_number("num_words", num_words, 1), len(vocabulary))
    mean = topics.reshape(-1, *topics.shape[-2:]).mean(0)
    if axes is None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(0.4 + 2.4 * len(mean), 0.8 + 0.25 * count), layout="constrained")
        axes = list(figure.subplots(1, len(mean), sharex=True, squeeze=False)[0])
    if len(axes) != len(mean):
        raise ShapeError(f"there are {len(axes)} axes for {len(mean)} topics; give one for each")
    for k, (ax, topic) in enumerate(zip(axes, mean, strict=True)):
        top = topic.topk(count)
        ax.barh(range(count), top.values.numpy(), color=BLUE, alpha=0.8)
        ax.set_yticks(range(count), [vocabulary[int(i)] for i in top.indices])
        ax.set_ylim(count - 0.4, -0.6)
        ax.set_title(f"topic {k}", fontsize="small")
        ax.set_xlabel("probability")
    return axes
