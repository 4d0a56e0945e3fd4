"""Latent Dirichlet allocation with every word's topic summed out, and its exact evidence on small corpora."""

from __future__ import annotations

import pyro
import pyro.distributions as dist
import torch
from torch import Tensor

from bayeskit._settings import real_number, whole_number
from bayeskit.errors import DataError, SettingsError, ShapeError

#: Assignments of topics to words that are listed at most.
MAX_ASSIGNMENTS = 1 << 16


class LatentDirichletAllocation:
    r"""Documents as mixtures of topics, topics as distributions of words.

    Topics :math:`\phi_k \sim \mathrm{Dirichlet}(\eta)`, proportions of each document
    :math:`\theta_d \sim \mathrm{Dirichlet}(\alpha)`, and each word of it has the probability
    :math:`\sum_k \theta_{dk} \phi_{kw}`: its topic is summed out.

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
        counts : Tensor
            How often each word occurs in each document, floating point or integers, ``(documents, num_words)``. The
            order of words is taken as known: no multinomial coefficient.

        Raises
        ------
        ShapeError, DataError
            If these are no counts of this vocabulary.
        """
        self._check(counts)
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
        return torch.xlogy(counts.to(topics.dtype), proportions @ topics).sum((-1, -2))

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
        self._check(counts)
        document, word = self._tokens(counts)
        size = self.num_topics ** len(word)
        if size > MAX_ASSIGNMENTS:
            raise SettingsError(
                f"{len(word)} words have {size} assignments of topics, more than the {MAX_ASSIGNMENTS} that are "
                "listed; use fewer words, or a sampler of the evidence"
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

    def _check(self, counts: Tensor) -> None:
        if counts.dim() != 2 or counts.shape[1] != self.num_words or not len(counts):
            raise ShapeError(f"counts have shape {tuple(counts.shape)}; they must be (documents, {self.num_words})")
        if not bool(((counts >= 0) & (counts == counts.round()) & (counts < torch.inf)).all()):
            raise DataError("counts must be whole numbers, none of them negative")


def _polya(counts: Tensor, concentration: float) -> Tensor:
    """Return the log probability of draws in a known order, their probabilities integrated out: ``(*batch, n, m)``."""
    alpha = torch.as_tensor(concentration, dtype=counts.dtype)
    total = alpha * counts.shape[-1]
    each = torch.lgamma(alpha + counts) - torch.lgamma(alpha)
    return (each.sum(-1) + torch.lgamma(total) - torch.lgamma(total + counts.sum(-1))).sum(-1)
