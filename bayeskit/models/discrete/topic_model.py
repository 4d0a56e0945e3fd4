"""Latent Dirichlet allocation with every word's topic summed out, its exact evidence on small corpora, its topics."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import pyro
import pyro.distributions as dist
import torch
from scipy.optimize import linear_sum_assignment
from torch import Tensor

from bayeskit.core.inputs import as_numbers, real_number, whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["LatentDirichletAllocation", "align_topics", "count_words", "plot_topics"]


#: Assignments of topics to words that are listed at most.
_MAX_ASSIGNMENTS = 1 << 16
#: Rounds of aligning topics at most; a few are enough.
_ROUNDS = 20
_WORD = re.compile(r"[^\W_]+(?:['\u2019-][^\W_]+)*")


class LatentDirichletAllocation:
    r"""Documents as mixtures of topics, topics as distributions of words.

    Topics :math:`\phi_k \sim \mathrm{Dirichlet}(\eta)`, proportions of each document
    :math:`\theta_d \sim \mathrm{Dirichlet}(\alpha)`, and each word of it has the probability
    :math:`\sum_k \theta_{dk} \phi_{kw}`: its topic is summed out.

    The order of topics means nothing, and may differ from chain to chain and change along one; :func:`align_topics` of
    the draws makes it the same in all. Counts come from texts by :func:`count_words`.

    Parameters
    ----------
    num_topics : int
    num_words : int
        Of the vocabulary, at least two.
    concentration : float, default 0.5
        :math:`\alpha`, of topics in a document.
    word_concentration : float, default 0.5
        :math:`\eta`, of words in a topic.

    Raises
    ------
    SettingsError
        If there is no topic, there are fewer than two words, or a concentration is not positive.

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

    #: Factors that are log probabilities of data, with all constants.
    normalised_factors = frozenset({"words"})

    def __init__(
        self, num_topics: int, num_words: int, concentration: float = 0.5, word_concentration: float = 0.5
    ) -> None:
        self.num_topics = whole_number("num_topics", num_topics, 1)
        self.num_words = whole_number("num_words", num_words, 2)
        self.concentration = real_number("concentration", concentration, between=(0, torch.inf))
        self.word_concentration = real_number("word_concentration", word_concentration, between=(0, torch.inf))

    def model(self, counts: Tensor) -> None:
        """Pyro model with continuous sites only: ``topics``, ``(num_topics, num_words)``, and ``proportions``.

        Parameters
        ----------
        counts : Tensor or array
            How often each word occurs in each document, of any kind of number, ``(documents, num_words)``. The order
            of words is taken as known: no multinomial coefficient.

        Raises
        ------
        ShapeError, DataError
            If these are no counts of this vocabulary.
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
        """Return the log probability of all words, each one's topic summed out.

        Parameters
        ----------
        topics : Tensor
            ``(*batch, num_topics, num_words)``.
        proportions : Tensor
            ``(*batch, documents, num_topics)``.
        counts : Tensor
            ``(documents, num_words)``.

        Returns
        -------
        Tensor
            ``(*batch)``.
        """
        counts = as_numbers("counts", counts).to(topics)
        probability = proportions @ topics
        # Absent words may be impossible; the derivative of their logarithm must not be asked for.
        return (counts * torch.where(counts > 0, probability, 1.0).log()).sum((-1, -2))

    def log_evidence(self, counts: Tensor) -> float:
        """Return the exact log evidence, by a sum over all topics of all words.

        Given those, proportions and topics integrate out in closed form. Words of one kind in one document are
        exchangeable, but are listed each, so that this is for a dozen words.

        Raises
        ------
        ShapeError, DataError
            If these are no counts of this vocabulary.
        SettingsError
            If there are too many assignments, naming their number.
        """
        counts = self._checked(counts)
        document, word = self._tokens(counts)
        size = self.num_topics ** len(word)
        if size > _MAX_ASSIGNMENTS:
            raise SettingsError(
                f"{len(word)} words have {size} assignments of topics, more than the {_MAX_ASSIGNMENTS} that are "
                "listed; use fewer words, or estimate it with bayeskit.inference.evidence.smc of "
                "Target.from_pyro(model.model, counts)"
            )
        place = self.num_topics ** torch.arange(len(word), device=counts.device)
        topic = torch.arange(size, device=counts.device).unsqueeze(-1) // place % self.num_topics
        one_hot = torch.nn.functional.one_hot(topic, self.num_topics).double()
        of_documents = torch.nn.functional.one_hot(document, len(counts)).double()
        of_words = torch.nn.functional.one_hot(word, self.num_words).double()
        in_documents = torch.einsum("atk,td->adk", one_hot, of_documents)
        in_topics = torch.einsum("atk,tw->akw", one_hot, of_words)
        log_joint = _polya(in_documents, self.concentration) + _polya(in_topics, self.word_concentration)
        return float(log_joint.logsumexp(0))

    def _tokens(self, counts: Tensor) -> tuple[Tensor, Tensor]:
        """Return document and word of each token."""
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
    """Return the log probability of draws in a known order, their probabilities integrated out: ``(*batch, n, m)``."""
    alpha = torch.as_tensor(concentration, dtype=counts.dtype)
    total = alpha * counts.shape[-1]
    each = torch.lgamma(alpha + counts) - torch.lgamma(alpha)
    return (each.sum(-1) + torch.lgamma(total) - torch.lgamma(total + counts.sum(-1))).sum(-1)


def align_topics(values: Mapping[str, Tensor], reference: Tensor | None = None) -> dict[str, Tensor]:
    """Put the topics of every draw in one order.

    A draw takes the order whose topics are nearest, by Hellinger's distance, to those of a reference: at first one of
    the draws, then the mean of all draws so ordered, until no draw changes. For pictures and tables of single topics;
    predictions and evidence do not need it. Chains that have found different topics, not only another order of them,
    stay different.

    Parameters
    ----------
    values : mapping of str to Tensor
        Such as ``draws.values()``: "topics", ``(*batch, num_topics, num_words)``, and "proportions",
        ``(*batch, documents, num_topics)``, if there are any.
    reference : Tensor, optional
        Topics whose order is taken, ``(num_topics, num_words)``; by default those of the last draw.

    Returns
    -------
    dict of str to Tensor
        The same values in their new order.

    Raises
    ------
    DataError
        If there are no topics.
    ShapeError
        If topics, proportions or the reference do not fit.

    References
    ----------
    Stephens, M. (2000). Dealing with label switching in mixture models. Journal of the Royal Statistical Society B 62,
    795-809.

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
    order = torch.full((len(flat), count), -1)
    for _ in range(_ROUNDS):
        likeness = torch.einsum("kw,sjw->skj", centre.sqrt(), flat.sqrt()).detach().cpu().numpy()
        found = torch.stack([torch.from_numpy(linear_sum_assignment(-one)[1]) for one in likeness])
        if bool((found == order).all()):
            break
        order = found
        centre = flat.gather(1, order.to(flat.device).unsqueeze(-1).expand_as(flat)).mean(0)
    order = order.to(flat.device).reshape(*batch, count)
    aligned = {**values, "topics": topics.gather(-2, order.unsqueeze(-1).expand_as(topics))}
    if proportions is not None:
        aligned["proportions"] = proportions.gather(-1, order.unsqueeze(-2).expand_as(proportions))
    return aligned


def count_words(
    texts: Sequence[str], *, min_count: int = 1, stop_words: Collection[str] = ()
) -> tuple[Tensor, tuple[str, ...]]:
    """Count the words of texts.

    A word is a run of letters and digits, with apostrophes and hyphens inside it; upper and lower case are the same.

    Parameters
    ----------
    texts : sequence of str
        A document each.
    min_count : int, default 1
        Words that all texts together have less often are left out.
    stop_words : collection of str, optional
        Words to leave out.

    Returns
    -------
    counts : Tensor
        ``(documents, words)``, int64.
    vocabulary : tuple of str
        The words, in alphabetical order.

    Raises
    ------
    DataError
        If the texts are no strings, or fewer than two words are left.

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
        raise DataError(f"the texts have {len(vocabulary)} words to count; give longer ones, or leave out fewer")
    return torch.tensor([[words[word] for word in vocabulary] for words in found]), vocabulary


def plot_topics(
    topics: Tensor, vocabulary: Sequence[str], axes: Sequence[Axes] | None = None, *, num_words: int = 8
) -> Sequence[Axes]:
    """Plot the most probable words of each topic.

    Parameters
    ----------
    topics : Tensor
        ``(*batch, num_topics, words)``; the mean over the batch is drawn, so that draws are to be aligned before.
    vocabulary : sequence of str
    axes : sequence of Axes, optional
        One for each topic; by default those of a new figure.
    num_words : int, default 8

    Returns
    -------
    sequence of Axes

    Raises
    ------
    ShapeError
        If the topics have another number of words, or there are too few axes.

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
