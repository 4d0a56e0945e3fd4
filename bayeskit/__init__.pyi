from bayeskit import errors as errors
from bayeskit import exact as exact
from bayeskit import ode as ode
from bayeskit._compiler import scan as scan
from bayeskit._draws import Draws as Draws
from bayeskit._draws import prior_predictive as prior_predictive
from bayeskit._logdensity.target import Target as Target
from bayeskit.inference import evidence as evidence
from bayeskit.inference import objectives as objectives
from bayeskit.inference import samplers as samplers
from bayeskit.inference._experiments import information as information
from bayeskit.inference.amortization import AmortizedPosterior as AmortizedPosterior
from bayeskit.inference.amortization import amortize as amortize
from bayeskit.inference.marginal import marginalize as marginalize
from bayeskit.inference.samplers import HMC as HMC
from bayeskit.inference.samplers import NUTS as NUTS
from bayeskit.inference.samplers import sample as sample
from bayeskit.inference.training import Fit as Fit
from bayeskit.inference.training import fit as fit
from bayeskit.workflows import SBCResult as SBCResult
from bayeskit.workflows import compare_models as compare_models
from bayeskit.workflows import sbc as sbc

__version__: str
