"""Kernels against reference values and 40-digit recursions, on inputs that lose digits elsewhere."""

import itertools

import mpmath
import pytest
import torch
from mpmath import mp, mpf
from torch import nn

from bayeskit.models.wide_networks import Elementwise, infinite_width
from bayeskit.models.wide_networks._activations import Erf

# Reference values: the closed forms at 40 digits for dense networks, another library in float64 for the others; rows
# of symmetric matrices from the diagonal on. Rows 0, 2 and 3 of the inputs are parallel or antiparallel.
# fmt: off
REFERENCE = {
    "relu": (
        [[0.608125, 0.369888306689908, 0.31064519977978, 0.986887794826384, 0.585834161835045],
         [0.6615625, 0.472242715073134, 0.539094493356565, 0.356567479787596],
         [0.608125, 0.436781578418419, 0.305563232944641],
         [1.73875, 0.943511434567831],
         [0.5715625]],
        [[1.549375, 0.456368672158862, 0.320240399131523, 2.50839984419745, 1.42972282692379],
         [1.7096875, 0.803993091282272, 0.627369348863713, 0.432172229325394],
         [1.549375, 0.418502889467102, 0.317289961494348],
         [4.94125, 2.3460653764725],
         [1.4396875]],
    ),
    "erf": (
        [[0.70362017536107, 0.09022463477532, -0.172871513426703, 0.73006143661048, 0.692118319128496],
         [0.716551235420964, 0.382177746150287, 0.0412433584050483, 0.0731434054837733],
         [0.70362017536107, -0.270660292146083, -0.158018375288746],
         [0.814936656426212, 0.712793969346835],
         [0.693442225701447]],
        [[2.10812963366127, -0.00683351284268262, -0.844038430365145, 2.30154136069294, 2.05116348382034],
         [2.18095648861375, 0.88834393730988, -0.146293707492345, -0.0592192922030913],
         [2.10812963366127, -1.20590234517411, -0.793490519026923],
         [2.97181191972476, 2.20622799099193],
         [2.05335772160757]],
    ),
    "gelu": (
        [[0.433112224064558, 0.207838677889736, 0.157763643052888, 0.754418358190013, 0.414182681337065],
         [0.480160538130268, 0.305197246269302, 0.311052890520349, 0.198441535587354],
         [0.433112224064558, 0.221479450218532, 0.155836225734668],
         [1.5374198989025, 0.71058673296198],
         [0.401723108171582]],
        [[1.10836836649584, 0.243174335286385, 0.12745382695332, 2.07259993426788, 1.0444951874805],
         [1.25871507358483, 0.568444991077632, 0.333113365833168, 0.224918634203686],
         [1.10836836649584, 0.158166642989838, 0.12766847000137],
         [4.59518455480939, 1.92122995771348],
         [1.00798460323988]],
    ),
    "relu, two sets of inputs": (
        [[0.377670622266622, 0.407911059436056],
         [0.344320180575939, 0.359015217177389],
         [0.301711203041645, 0.449357007208972],
         [0.549723582607344, 0.608669827839607],
         [0.38103022055688, 0.416435931028329]],
        [[0.648485975232057, 0.551626855216232],
         [0.505119860102458, 0.386182403465766],
         [0.382806641205113, 0.690762194735349],
         [0.944377933088166, 0.796940607437234],
         [0.679758304737338, 0.599026355385827]],
    ),
    "relu without bias": (
        [[0.893333333333334, 0.384444163139887, 0.28435683165752, 1.78666666666667, 0.840534256156275],
         [1.02, 0.592079824142374, 0.768888326279775, 0.355006104742961],
         [0.893333333333334, 0.56871366331504, 0.270348283050122],
         [3.57333333333334, 1.68106851231255],
         [0.806666666666667]],
        [[2.68, 0.396986218341018, 0.28435683165752, 5.36, 2.40753527055558],
         [3.06, 1.0649463137651, 0.793972436682037, 0.349901086690063],
         [2.68, 0.56871366331504, 0.251110869714071],
         [10.72, 4.81507054111117],
         [2.42]],
    ),
    "layer norm": (
        [[0.849999999999118, 0.470972576088989, 0.398979408438201, 0.84030405187491, 0.844240475790693],
         [0.849999999999118, 0.61742041114198, 0.458367979982759, 0.46399139853356],
         [0.849999999999118, 0.390939957138263, 0.400802387415432],
         [0.849999999999118, 0.832901201504486],
         [0.849999999999118]],
        [[2.26176470587971, 0.582431580030986, 0.398927858500433, 2.12407248359246, 2.16078010929344],
         [2.26176470587972, 1.07885225711633, 0.545258624517139, 0.561690134462668],
         [2.26176470587971, 0.391085053045316, 0.401812086865182],
         [2.26176470587978, 2.06635259408648],
         [2.2617647058797]],
    ),
    "residual": (
        [[2.07484375, 0.995576024960702, 0.672617113550412, 3.62053210208359, 1.9837608336589],
         [2.293046875, 1.48572495750335, 1.570156206375, 0.940144734738363],
         [2.07484375, 0.983346074014533, 0.663359623005118],
         [6.6915625, 3.44284620788838],
         [1.925546875]],
        [[5.621875, 1.22741280278477, 0.522129731176797, 9.36429007983217, 5.1512738594844],
         [6.2453125, 2.68134369383858, 1.75756611445573, 1.12877473423227],
         [5.621875, 0.557840949885868, 0.531776449924558],
         [18.8125, 8.73103516089202],
         [5.1953125]],
    ),
    "convolutions, average": (
        [[0.349146269337919, 0.351066190341693, 0.369673787034046],
         [0.390064993208366, 0.398567682017697],
         [0.430085062787489]],
        [[0.522965356859332, 0.471738809161144, 0.500615364882454],
         [0.572729578999042, 0.546654982462757],
         [0.633131054510744]],
    ),
    "convolutions, flatten": (
        [[0.537564431182869, 0.36433161445666, 0.39096889373705],
         [0.636805913833768, 0.465981591008642],
         [0.728075629279063]],
        [[1.33769329347, 0.483199119516396, 0.532744206531522],
         [1.63541774150131, 0.732617743263936],
         [1.90922688783719]],
    ),
    "residual convolutions": (
        [[0.62485306636354, 0.605761305985269, 0.6465970280067],
         [0.721840732549678, 0.731544768635434],
         [0.800749168477521]],
        [[0.894446424607593, 0.754710474976081, 0.810548128137175],
         [0.992953241177975, 0.934380968873784],
         [1.09092809790424]],
    ),
}
X = [
    [1.0, 0.5, -0.3],
    [0.2, -1.0, 0.7],
    [-1.0, -0.5, 0.3],
    [2.0, 1.0, -0.6],
    [0.9, 0.6, -0.2],
]
X2 = [
    [0.3, 0.4, 0.5],
    [-0.7, 1.1, 0.2],
]
# Three images of four rows and columns, with two channels last.
IMAGES = [
    [
        [[0.12573, -0.132105], [0.640423, 0.1049], [-0.535669, 0.361595], [1.304, 0.947081]],
        [[-0.703735, -1.265421], [-0.623274, 0.041326], [-2.325031, -0.218792], [-1.245911, -0.732267]],
        [[-0.544259, -0.3163], [0.411631, 1.042513], [-0.128535, 1.366463], [-0.665195, 0.35151]],
        [[0.90347, 0.094012], [-0.743499, -0.921725], [-0.457726, 0.220195], [-1.009618, -0.209176]],
    ],
    [
        [[-0.159225, 0.540846], [0.214659, 0.355373], [-0.653829, -0.129614], [0.783975, 1.493431]],
        [[-1.259066, 1.513924], [1.345875, 0.781311], [0.264456, -0.313923], [1.458021, 1.960258]],
        [[1.801635, 1.315104], [0.35738, -1.208319], [-0.004454, 0.656475], [-1.288361, 0.395122]],
        [[0.429864, 0.696043], [-1.184118, -0.661703], [-0.436435, -1.169802], [1.739368, -0.495911]],
    ],
    [
        [[0.32897, -0.258573], [1.583473, 1.320361], [0.633353, -2.20351], [0.052029, 0.683686]],
        [[1.003962, -0.617907], [1.822011, -1.320431], [-0.661528, 0.93505], [0.049055, 2.002393]],
        [[0.188519, -0.633194], [-0.377564, -1.091146], [-1.27768, 0.630411], [0.581166, 1.294559]],
        [[-0.754606, 1.689107], [-0.287388, 1.574408], [-0.432786, -0.735483], [0.249785, 1.031453]],
    ],
]
# fmt: on


ACTIVATIONS = {"relu": nn.ReLU, "erf": lambda: Elementwise(Erf()), "gelu": nn.GELU}


def double(x):
    return torch.tensor(x, dtype=torch.float64)


def dense(activation, depth, bias=True, normalized=False, inputs=3):
    layers = [nn.Linear(inputs, 8, bias=bias)]
    for i in range(depth):
        layers += [nn.LayerNorm(8, eps=1e-12, elementwise_affine=False)] if normalized else []
        layers += [ACTIVATIONS[activation](), nn.Linear(8, 8 if i < depth - 1 else 1, bias=bias)]
    return nn.Sequential(*layers)


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(3, 8), nn.Linear(8, 1)
        self.blocks = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = h + block(torch.relu(h))
        return self.last(torch.relu(h))


class ResidualConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = conv(2), conv(8), nn.Linear(8, 1)

    def forward(self, x):
        h = self.first(x)
        h = h + self.second(torch.relu(h))
        return self.last(torch.relu(h).mean((2, 3)))


def conv(channels):
    return nn.Conv2d(channels, 8, 3, padding=1)


def convolutions(*readout):
    return nn.Sequential(conv(2), nn.ReLU(), conv(8), nn.ReLU(), *readout)


NETWORKS = {
    "relu": dense("relu", 2),
    "erf": dense("erf", 2),
    "gelu": dense("gelu", 2),
    "relu, two sets of inputs": dense("relu", 2),
    "relu without bias": dense("relu", 2, bias=False),
    "layer norm": dense("relu", 2, normalized=True),
    "residual": Residual(),
    "convolutions, average": convolutions(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 1)),
    "convolutions, flatten": convolutions(nn.Flatten(), nn.Linear(128, 1)),
    "residual convolutions": ResidualConvolution(),
}


def whole(rows):
    """Return a symmetric matrix from its upper half."""
    if len(rows[0]) == len(rows[-1]):
        return double(rows)
    upper = torch.zeros(len(rows), len(rows), dtype=torch.float64)
    for i, row in enumerate(rows):
        upper[i, i:] = double(row)
    return upper + upper.triu(1).mT


def assert_exact(got, wanted, tolerance=1e-10):
    scale = wanted.abs() + 1e-4 * wanted.abs().max()  # entries that are zero but for rounding
    assert float(((got - wanted).abs() / scale).max()) < tolerance


@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_are_the_reference_values(name):
    if "convolutions" in name:
        inputs = [double(IMAGES).permute(0, 3, 1, 2)]
    else:
        inputs = [double(X), double(X2)] if "two sets" in name else [double(X)]
    bias = 0.0 if "without" in name else 0.1
    weight = 2.0 if "without" in name else 1.5
    found = infinite_width(NETWORKS[name], weight_variance=weight, bias_variance=bias).both(*inputs)
    nngp, ntk = (whole(rows) for rows in REFERENCE[name])
    assert_exact(found.nngp, nngp)
    assert_exact(found.ntk, ntk)


def rectifier(k, a, b):
    """Return both moments at the working precision."""
    sine = mpmath.sqrt(max(a * b - k * k, 0))
    angle = mpmath.pi - mpmath.atan2(sine, k)
    return (sine + angle * k) / (2 * mpmath.pi), angle / (2 * mpmath.pi)


def test_flattened_convolutions_at_40_digits():
    """Sites do not mix behind a Flatten, so that the recursion goes pair by pair of images, site by site.

    The reference value of this tangent kernel is right to 6e-11 only.
    """
    images = double(IMAGES).permute(0, 3, 1, 2)
    found = infinite_width(NETWORKS["convolutions, flatten"], "ntk", 1.5, 0.1).both(images)
    with mp.workdps(40):
        for i, j in itertools.combinations_with_replacement(range(3), 2):
            nngp, ntk = flattened_pair(images[i], images[j])
            assert abs(float(found.nngp[i, j]) / nngp - 1) < 1e-13
            assert abs(float(found.ntk[i, j]) / ntk - 1) < 1e-13


def flattened_pair(x, y):
    weight, bias = mpf(1.5), mpf(0.1)
    sites = list(itertools.product(range(4), repeat=2))

    def average(table):
        around = list(itertools.product((-1, 0, 1), repeat=2))
        return {(p, q): sum(table.get((p + r, q + s), mpf(0)) for r, s in around) / 9 for p, q in sites}

    def products(u, v):
        return {
            (p, q): sum(mpf(c) * mpf(d) for c, d in zip(u[:, p, q].tolist(), v[:, p, q].tolist(), strict=True)) / 2
            for p, q in sites
        }

    tables = [products(x, y), products(x, x), products(y, y)]
    tangent = {site: mpf(0) for site in sites}
    for _ in range(2):
        tables = [{site: weight * value + bias for site, value in average(table).items()} for table in tables]
        grown = average(tangent)
        tangent = {site: tables[0][site] + weight * grown[site] for site in sites}
        k, a, b = tables
        tangent = {site: tangent[site] * rectifier(k[site], a[site], b[site])[1] for site in sites}
        tables = [
            {site: rectifier(*(t[site] for t in three))[0] for site in sites}
            for three in ((k, a, b), (a, a, a), (b, b, b))
        ]
    nngp = weight * sum(tables[0].values()) / 16 + bias
    return float(nngp), float(nngp + weight * sum(tangent.values()) / 16)
