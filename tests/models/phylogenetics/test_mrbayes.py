"""MrBayes blocks: what they ask for is used, or an error names the command."""

import math
import re
import warnings
from importlib import resources

import pyro
import pytest
import torch
from pyro import poutine

import bayeskit as bk
from bayeskit.errors import AlignmentError, ConversionWarning, DataWarning, TreeError
from bayeskit.models.phylogenetics import MrBayesBlock, PartitionedTreeModel, Tree, TreeModel, primates
from bayeskit.models.phylogenetics._mrbayes import has_mrbayes_block, set_block_aside

DATA = (
    "#NEXUS\nbegin data;\ndimensions ntax=5 nchar=12;\nformat datatype=dna;\nmatrix\n"
    "A ACGTACGTACGA\nB ACGTACGAACGA\nC ACGAACGAACTA\nD ACCAACGATCTA\nE ACCAATGATCTG\n;\nend;\n"
    "begin trees;\ntree first = (A,B,(C,(D,E)));\ntree other = (A,C,(B,(D,E)));\nend;\n"
    "begin mrbayes;\n"
)
TREE = Tree.from_newick("(A,B,(C,(D,E)));")
HALVES = "charset x = 1-6; charset y = 7-.; partition two = 2: x, y; set partition=two;\n"
THIRDS = "charset x = 1-.\\3; charset y = 2-.\\3; partition three = 3: x, y, 3-.\\3; set partition=three;\n"


def write(tmp_path, commands, data=DATA):
    path = tmp_path / "mine.nex"
    path.write_text(f"{data}{commands}\nend;\n")
    return path


def read(tmp_path, commands, data=DATA):
    return MrBayesBlock.from_file(write(tmp_path, commands, data))


def sampled(block):
    return sorted(block.model(TREE).priors)


# MrBayes 3.2.7a prints log likelihood and log prior where a run starts; they are in single precision. The tree is that
# of `primates`, with lengths from 0.02 to 0.2 in the order of its edges.
STARTS = {
    "one subset": (
        "lset nst=2 rates=invgamma; prset statefreqpr=dir(2,3,4,5) tratiopr=beta(3,2) shapepr=exp(2) "
        "pinvarpr=uniform(0,0.8) brlenspr=unconstrained:gammadir(2,0.5,1.5,0.7);",
        {"kappa": 2.5, "base_frequencies": [0.3, 0.2, 0.15, 0.35], "shape": 0.5, "proportion": 0.2},
        (-6408.034699, 5.763805),
    ),
    "three subsets": (
        "charset a=1-400; charset b=401-600; charset c=601-898; partition p=3:a,b,c; set partition=p; "
        "lset app=(1) rates=gamma; lset app=(2) rates=invgamma nst=6; lset app=(3) nst=2 rates=gamma ngammacat=5; "
        "prset ratepr=variable; prset brlenspr=unconstrained:exp(10);",
        {
            "base_frequencies": [0.3, 0.2, 0.15, 0.35],
            "shape_a_b": 0.5,
            "shape_c": 1.5,
            "proportion_b": 0.2,
            "kappa_c": 2.5,
            "exchangeabilities_b": [0.1, 0.3, 0.1, 0.05, 0.4, 0.05],
            "rate_shares": [0.5 * 400 / 898, 1.5 * 200 / 898, 1 - 500 / 898],
        },
        (-6498.264108, 7.916395),
    ),
    "all fixed": (
        "lset nst=6; prset statefreqpr=fixed(empirical) brlenspr=unconstrained:twoexp(100,10) "
        "revmatpr=fixed(1,2,3,4,5,6);",
        {},
        (-6800.089392, -107.162179),
    ),
}


@pytest.mark.parametrize("case", STARTS)
def test_likelihood_and_prior_of_mrbayes(tmp_path, case):
    commands, numbers, (log_likelihood, log_prior) = STARTS[case]
    data = (resources.files("bayeskit.models.phylogenetics") / "data" / "primates.nex").read_text()
    _, tree = primates()
    model = read(tmp_path, commands, data + "\nbegin mrbayes;\n").model(tree)
    values = {name: torch.tensor(value, dtype=torch.float64) for name, value in numbers.items()}
    assert values.keys() == model.priors.keys()
    lengths = torch.linspace(0.02, 0.2, 21, dtype=torch.float64)
    assert abs(model.log_likelihood(lengths, **values).item() - log_likelihood) < 1e-3
    trace = poutine.trace(poutine.condition(model, {"branch_lengths": lengths, **values})).get_trace()
    trace.compute_log_prob(lambda name, site: name != "alignment")
    found = sum(trace.nodes[name]["log_prob"].item() for name in ["branch_lengths", *values])
    # MrBayes has densities of kappa / (1 + kappa) and of the relative rates, and counts the topologies.
    if case != "all fixed":
        found += 2 * math.log(1 + 2.5)
    if case == "three subsets":
        found += math.log(400 / 898) + math.log(200 / 898)
    found -= sum(math.log(edges) for edges in range(3, 20, 2))
    assert abs(found - log_prior) < 1e-5


def test_defaults_are_those_of_mrbayes(tmp_path):
    block = read(tmp_path, "lset nst=2 rates=invgamma;")
    assert str(block).splitlines()[1:] == [
        "  all (12 sites): HKY85, InvariantSites, GammaRates with 4 categories",
        "    kappa / (1 + kappa) ~ Beta(1, 1)",
        "    base_frequencies ~ Dirichlet(1, 1, 1, 1)",
        "    proportion ~ Uniform(0, 1)",
        "    shape ~ Exponential(1)",
        "  branch lengths ~ gammadir(1, 0.1, 1, 1)",
    ]
    assert "exchangeabilities ~ Dirichlet(1, 1, 1, 1, 1, 1)" in str(read(tmp_path, "lset nst=6;"))


SUBSTITUTION = {
    "lset nst=1;": ("F81", ["base_frequencies"]),
    "prset statefreqpr=fixed(equal);": ("JC69", []),
    "lset nst=2; prset statefr=fixed(equal);": ("K80", ["kappa"]),
    "lset nst=2; prset statefreqpr=fixed(.1,.2,.3,.4) tratio=fixed(2);": ("HKY85", []),
    "LSET NST=6;PRSET STATEFREQPR=FIXED(EQUAL);": ("GTR", ["exchangeabilities"]),
    "lset nst = 6\n rates = prop; prset revmat = fixed( 1, 2,3 ,4,5,6 );": ("GTR", ["base_frequencies", "proportion"]),
    "ls r=gam ng=8; prs shap=uni(0.1,50) pinvarpr=fixed(0.1);": ("F81", ["base_frequencies", "shape"]),
    "lset nst=6; lset nst=1; prset shapepr=fixed(0.5); lset rates=inv;": ("F81", ["base_frequencies", "proportion"]),
}


@pytest.mark.parametrize("commands", SUBSTITUTION)
def test_substitution_models(tmp_path, commands):
    block = read(tmp_path, commands)
    name, parameters = SUBSTITUTION[commands]
    assert str(block).splitlines()[1].startswith(f"  all (12 sites): {name}")
    assert isinstance(block.model(TREE), TreeModel)
    assert sampled(block) == sorted(parameters)


LINKS = {
    "": ["base_frequencies"],
    "lset nst=2; unlink tratio=(all);": ["base_frequencies", "kappa_3", "kappa_x", "kappa_y"],
    "lset nst=2; unlink statefreq=(1,2);": ["base_frequencies_3", "base_frequencies_x", "base_frequencies_y", "kappa"],
    "lset nst=2; unlink tratio=(all); link tratio=(1,3);": ["base_frequencies", "kappa_x_3", "kappa_y"],
    "lset rates=gamma; prset app=(2) shapepr=exp(2);": ["base_frequencies", "shape_x_3", "shape_y"],
    "lset rates=gamma; lset app=(2) ngammacat=6;": ["base_frequencies", "shape_x_3", "shape_y"],
    "lset app=(1) rates=gamma; lset app=(3) rates=invgamma;": ["base_frequencies", "proportion_3", "shape"],
    "lset app=(1,2) nst=6; prset app=(1) statefreq=fixed(equal);": ["base_frequencies", "exchangeabilities"],
    "prset ratepr=variable;": ["base_frequencies", "rate_shares"],
    "unlink brlens=(all);": ["base_frequencies"],
    "lset nst=2; set partition=default;": ["base_frequencies"],
}


@pytest.mark.parametrize("commands", LINKS)
def test_links_are_those_of_mrbayes(tmp_path, commands):
    """The expected values agree with what `showmodel` of MrBayes 3.2.7a prints for such commands."""
    block = read(tmp_path, THIRDS + commands)
    assert sampled(block) == sorted(LINKS[commands])
    assert block.separate_branch_lengths == ("brlens" in commands)


def test_partitions_and_relative_rates(tmp_path):
    block = read(tmp_path, THIRDS + "lset nst=2; prset applyto=(all) ratepr=dirichlet(2,3,4);")
    assert {name: part.num_sites for name, part in block.partition.subsets.items()} == {"x": 4, "y": 4, "3": 4}
    assert block.partition.relative_rates.concentration.tolist() == [2, 3, 4]
    model = block.model(TREE)
    assert isinstance(model, PartitionedTreeModel)
    u = bk.Target.from_pyro(model, compile=False).sample_prior(3, seed=0)
    assert bool(bk.Target.from_pyro(model, compile=False).log_density(u).isfinite().all())
    for words in ("x (4 sites): HKY85", "kappa: one value in x, y, 3", "relative rates ~ Dirichlet(2, 3, 4)"):
        assert words in str(block)
    apart = read(tmp_path, THIRDS + "unlink brlens=(all);")
    assert "branch lengths in each subset" in str(apart) and apart.partition.length_groups == (("x",), ("y",), ("3",))
    some = read(tmp_path, THIRDS + "unlink brlens=(all); link brlens=(1,3);")
    assert some.separate_branch_lengths and some.partition.length_groups == (("x", "3"), ("y",))
    assert "branch_lengths: the same in x, 3" in str(some)


def test_data_that_are_left_out(tmp_path):
    block = read(tmp_path, "taxset t = 1 C; charset s = 3-5; exclude s 12; include 5; delete t; restore 1; outgroup E;")
    assert block.alignment.taxa == ("A", "B", "D", "E") and block.outgroup == "E"
    assert block.alignment.num_sites == 9
    whole = MrBayesBlock.from_file(write(tmp_path, "lset nst=1;")).alignment
    expected = whole.select(["A", "B", "D", "E"]).select_sites([0, 1, 4, 5, 6, 7, 8, 9, 10])
    assert torch.equal(
        block.alignment.patterns[:, block.alignment.site_patterns], expected.patterns[:, expected.site_patterns]
    )
    block = read(tmp_path, HALVES + "exclude 1-4;")
    assert [part.num_sites for part in block.partition.subsets.values()] == [2, 6]


def test_topologies(tmp_path):
    block = read(tmp_path, "constraint c = D E; constraint d hard = A B C; prset topologypr = constraints(c, d);")
    assert block.constraints == {"c": ("D", "E"), "d": ("A", "B", "C")}
    block.model(TREE)
    with pytest.raises(TreeError, match=r"mine\.nex: the constraint 'c' \(D, E\) excludes the tree.*Remedy"):
        block.model(Tree.from_newick("(A,E,(C,(D,B)));"))
    block = read(tmp_path, "constraint c = A E; prset topologypr=fixed(OTHER);")
    assert not block.constraints and block.topology.taxa == ("A", "C", "B", "D", "E")
    assert "topology: (A,C,(B,(D,E)));" in str(block)
    block.model()
    with pytest.raises(TreeError, match="the block fixes another topology"):
        block.model(TREE)
    with pytest.raises(TreeError, match="fixes no topology"):
        read(tmp_path, "lset nst=1;").model()


def test_settings_of_a_run_are_named_once(tmp_path):
    commands = "set autoclose=yes; mcmcp ngen=1000 nruns=2 file=a.b/c; mcmc; sump burnin=10; propset a$b=1;"
    with pytest.warns(ConversionWarning) as caught:
        read(tmp_path, commands)
    assert len(caught) == 1 and caught[0].filename == __file__
    said = (
        "mine.nex: these settings .*: set autoclose, mcmcp ngen, mcmcp nruns, mcmcp file, mcmc, sump burnin, propset b"
    )
    assert re.search(said, str(caught[0].message))


LACKING = {
    "prset brlenspr=clock:uniform;": "brlenspr=clock:uniform",
    "prset brlenspr=fixed(first);": r"brlenspr=fixed\(first\)",
    "prset brlenspr=unconstrained:invgam(3,.1,1,1);": "an inverse Gamma",
    "prset clockvarpr=igr;": "clockvarpr",
    "prset aamodelpr=mixed;": "aamodelpr",
    "prset topologypr=speciestree;": "species trees",
    "set speciespartition=a;": "species trees",
    "lset nst=mixed;": "nst=mixed",
    "lset nucmodel=codon;": "nucmodel=codon",
    "lset covarion=yes;": "covarion=yes",
    "lset coding=variable;": "coding=variable of bases or amino acids",
    "lset rates=adgamma;": "rates=adgamma",
    "lset rates=lnorm;": "rates=lnorm",
    "mcmcp data=no;": "runs without data",
    "mcmc reweight=10,20;": "weights of characters",
    "unlink topology=(all);": "unlink topology",
    "ctype irrev: 1;": "irreversible characters",
    "prset symdirihyperpr=fixed(1);": r"symdirihyperpr=fixed\(1\)",
    "prset aamodelpr=fixed(rtrev);": r"aamodelpr=fixed\(rtrev\)",
    "calibrate A=unif(1,2);": "the command CALIBRATE",
    "execute other.nex;": "the command EXECUTE",
    "constraint c partial = A B : C D;": "partial constraints",
    HALVES + "prset applyto=(1) brlenspr=unconstrained:exp(2);": "brlenspr that differs between subsets",
    HALVES + "prset applyto=(1) ratepr=variable;": "relative rates of some subsets",
    HALVES + "prset ratepr=variable; unlink brlens=(all);": "relative rates beside separate",
}


@pytest.mark.parametrize("commands", LACKING)
def test_what_there_is_no_model_for(tmp_path, commands):
    line = DATA.count("\n") + commands.count("\n") + 1
    with pytest.raises(
        AlignmentError, match=rf"mine\.nex, line {line}: '.*': there is no model for {LACKING[commands]}"
    ) as error:
        read(tmp_path, commands)
    assert "Remedy" in str(error.value)


MALFORMED = {
    "lst nst=2;": "'lst' is no command. Remedy: use lset or set",
    "ctype ordered;": "it cannot be read",
    "ctype dollo: 1;": "there is no model for characters of the type 'dollo'",
    "lset coding=most;": "'most' is no coding",
    "prset aamodelpr=fixed(mine);": "'mine' is no model of amino acids",
    "show;": "'show' is short for showbeagle and showmatrix",
    "lset nts=2;": "'nts' is no option of LSET. Remedy: use nst",
    "lset n=2;": "'n' is short for",
    "lset nst=3;": "'3' is no number of substitution types",
    "lset nst 2;": "it cannot be read",
    "lset rates=gamma;; lset ngammacat=x;": "'x' is no number of categories",
    "lset applyto=1 nst=6;": "'1' is no list of subsets",
    "lset applyto=(2) nst=6;": "'2' is not within the 1 subsets",
    "prset shapepr=exp(a);": "'a' are not numbers",
    "prset shapepr=exp(-1);": "outside the domain",
    "prset shapepr=uniform(3,1);": "outside the domain",
    "prset pinvarpr=uniform(0,2);": "outside the domain",
    "prset tratiopr=beta(1);": "beta has 1 numbers instead of 2",
    "prset tratiopr=gamma(1,1);": "'gamma' is no prior for tratiopr",
    "prset revmatpr=dirichlet(1,2);": "dirichlet has 2 numbers instead of 6",
    "prset statefreqpr=fixed(0,0.5,0.2,0.3);": "outside the domain",
    "prset topologypr=constraints(c);": "there is no constraint 'c'",
    "prset topologypr=fixed(third);": "there is no such tree in the file. Remedy: name one of first, other",
    "set partition=two;": "there is no partition 'two'",
    "partition two = 3: 1-6, 7-12;": "number and list of subsets do not agree",
    "partition two = 2: 1-6, 8-12;": "the sites 7 .* are in no subset",
    "partition two = 2: 1-6, 6-12;": "overlap; sites in both are 6 ",
    "charset x = 1-13;": "'1-13' is not within the 12 sites",
    "exclude third;": "'third' is neither a site nor a set",
    "delete F;": "'F' is neither a taxon nor a set",
    "outgroup A B;": "the outgroup is not one taxon",
    "constraint A B;": "it cannot be read",
}


@pytest.mark.parametrize("commands", MALFORMED)
def test_malformed_commands(tmp_path, commands):
    line = DATA.count("\n") + 1
    with pytest.raises(AlignmentError, match=rf"mine\.nex, line {line}: .*{MALFORMED[commands]}") as error:
        read(tmp_path, commands)
    assert "Remedy" in str(error.value)


def test_nothing_left(tmp_path):
    with pytest.raises(AlignmentError, match=r"all sites of 'x' \(1-6\) are excluded"):
        read(tmp_path, HALVES + "exclude x;")
    with pytest.raises(AlignmentError, match="there is no MrBayes block"):
        MrBayesBlock.from_file(write(tmp_path, "", DATA.replace("mrbayes", "paup")))


def test_blocks_set_aside(tmp_path):
    path = write(tmp_path, "lset nst=6; charset x=1-3;")
    assert has_mrbayes_block(path)
    with pytest.warns(
        ConversionWarning, match=rf"mine\.nex, line {DATA.count(chr(10)) + 1}: the MrBayes block is not used"
    ):
        set_block_aside(path)
    for command in ("exclude 1-3", "del A", "execute x.nex"):
        with pytest.raises(AlignmentError, match=f"'{command}' changes the data. Remedy"):
            set_block_aside(write(tmp_path, f"{command};"))
    path = write(tmp_path, "", DATA.replace("begin mrbayes", "[begin mrbayes;] begin notes"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        set_block_aside(path)
    assert not has_mrbayes_block(path)


def test_prior_of_kappa_is_that_of_the_share(tmp_path, limit):
    prior = read(tmp_path, "lset nst=2; prset tratiopr=beta(3,2);").model(TREE).priors["kappa"]
    pyro.set_rng_seed(0)
    share = 1 - 1 / (1 + prior.sample((20_000,)))
    error = math.sqrt(3 * 2 / (5**2 * 6) / 20_000)
    assert abs(share.mean().item() - 0.6) < limit() * error


# Data of other types than bases. The numbers are log-likelihoods that MrBayes 3.2.7a prints where a run starts, on this
# tree; of data with free frequencies or shapes they are fixed in the block.

FOUR = Tree.from_newick("(a:0.1,b:0.1,(c:0.1,d:0.1):0.1);")
MIXED = "mixed(dna:1-6,protein:7-10,standard:11-16,restriction:17-20)"
TWO_STATES = {
    **{"a": "ACGTACMKVL0101011101", "b": "ACGTAAMKIL0111011001"},
    **{"c": "ACTTAAMRVL1001110111", "d": "ACTTCAMRIL1100010011"},
}
PROTEINS = {"a": "MKVLARND", "b": "MKILGRNE", "c": "MRVLAKCD", "d": "MRI-GHC?"}
SITES = {"a": "1101", "b": "1001", "c": "0111", "d": "0011"}
BINARY = {"a": "0101", "b": "0110", "c": "1000", "d": "1100"}
SEVERAL_STATES = {"a": "0102013", "b": "0111012", "c": "1002113", "d": "1100011"}
FREQUENCIES = "prset applyto=(1) statefreqpr=fixed(.1,.2,.3,.4); prset applyto=(4) statefreqpr=fixed(0.3,0.7);"
PARTS = (
    "charset m=11-12; partition p=5: 1-6,7-10,m,13-16,17-20; set partition=p; "
    "prset app=(1) statefreqpr=fixed(.1,.2,.3,.4); prset applyto=(5) statefreqpr=fixed(0.3,0.7); "
    "lset applyto=(3,4) rates=gamma; prset shapepr=fixed(0.5);"
)
BY_TYPE = [
    (MIXED, TWO_STATES, FREQUENCIES, -76.21622),
    (MIXED, TWO_STATES, f"{FREQUENCIES} lset rates=invgamma; prset shapepr=fixed(0.5) pinvarpr=fixed(0.2);", -77.60077),
    (MIXED, TWO_STATES, f"{FREQUENCIES} prset aamodelpr=fixed(wag);", -70.40624),
    (MIXED, TWO_STATES, f"{FREQUENCIES} exclude 3 8 12;", -60.7433),
    (MIXED, TWO_STATES, PARTS, -76.48749),
    ("restriction", SITES, "prset statefreqpr=fixed(0.3,0.7);", -11.77654),
    ("restriction", SITES, "prset statefreqpr=fixed(0.3,0.7); lset coding=variable;", -8.603755),
    (
        "restriction",
        {"a": "110?", "b": "100?", "c": "01?1", "d": "0010"},
        "prset statefreqpr=fixed(empirical);",
        -11.73697,
    ),
    ("protein", PROTEINS, "lset nst=2;", -71.97917),
    ("protein", PROTEINS, "prset aamodelpr=fixed(jones);", -61.44949),
    ("protein", PROTEINS, f"prset aamodel=fix(equalin) statefreqpr=fixed(.1,.025,.025{17 * ',.05'});", -72.95415),
    ("standard", BINARY, "lset nst=1;", -9.496217),
    ("standard", BINARY, "lset coding=informative;", -1.004677),
    ("standard", SEVERAL_STATES, "ctype ordered: 3-5 7; lset coding=all;", -33.01978),
]


def typed(kind, rows):
    matrix = "\n".join(f"{taxon} {row}" for taxon, row in rows.items())
    size = f"ntax={len(rows)} nchar={len(next(iter(rows.values())))}"
    return (
        f"#NEXUS\nbegin data;\ndimensions {size};\nformat datatype={kind} missing=? gap=-;\nmatrix\n{matrix}\n;\nend;\n"
        "begin mrbayes;\n"
    )


@pytest.mark.filterwarnings("ignore:.*cannot be in data of coding")
@pytest.mark.parametrize(("kind", "rows", "commands", "expected"), BY_TYPE)
def test_likelihood_of_other_types_of_data(tmp_path, kind, rows, commands, expected):
    model = read(tmp_path, commands, typed(kind, rows)).model(FOUR)
    assert not model.priors
    assert float(model.log_likelihood(FOUR.branch_lengths)) == pytest.approx(expected, abs=1e-4)


def test_defaults_of_each_type(tmp_path):
    with pytest.warns(DataWarning, match=r"the characters 16 \(counted from 1\) of 'standard' cannot be in data"):
        block = read(
            tmp_path,
            "lset rates=invgamma; ctype ordered: 11 14;",
            typed(MIXED, TWO_STATES | {"e": "?" * 13 + "2" + "?" * 6}),
        )
    assert str(block).splitlines() == [
        f"MrBayes block of {tmp_path}/mine.nex: 5 taxa, 19 sites",
        "  DNA (6 sites): F81, InvariantSites, GammaRates with 4 categories",
        "    base_frequencies ~ Dirichlet(1, 1, 1, 1)",
        "    proportion ~ Uniform(0, 1)",
        "    shape ~ Exponential(1)",
        "  protein (4 sites): Poisson, InvariantSites, GammaRates with 4 categories",
        "    proportion ~ Uniform(0, 1)",
        "    shape ~ Exponential(1)",
        "  states_2 (4 characters): Mk with 2 states, coding variable",
        "  ordered_3 (1 character): OrderedMk with 3 states, coding variable",
        "  restriction (4 characters): Binary, coding noabsence",
        "    state_frequencies ~ Dirichlet(1, 1)",
        "  branch lengths ~ gammadir(1, 0.1, 1, 1)",
    ]
    assert block.alignment is None
    assert sorted(block.partition.priors(torch.empty(0))) == [
        *("base_frequencies_DNA", "proportion_DNA", "proportion_protein", "shape_DNA", "shape_protein"),
        "state_frequencies_restriction",
    ]


def test_parameters_are_linked_within_a_type(tmp_path):
    """As in `showmodel` of MrBayes 3.2.7a."""
    charsets = "charset m=11-13; partition p = 5: 1-6, 7-10, m, 14-15, 16-20; set partition=p; lset rates=gamma;"
    kind = "mixed(dna:1-6,protein:7-10,standard:11-15,restriction:16-20)"
    block = read(tmp_path, f"{charsets} prset aamodelpr=fixed(equalin);", typed(kind, TWO_STATES))
    assert list(block.partition.subsets) == ["1", "2", "m_states_2", "4_states_2", "5"]
    assert block.partition.linked == {"shape": (("m_states_2", "4_states_2"),)}
    block = read(tmp_path, f"{charsets} unlink shape=(3);", typed(kind, TWO_STATES))
    assert not block.partition.linked


@pytest.mark.filterwarnings("ignore:.*cannot be in data of coding")
def test_characters_of_one_division_have_one_rate_and_the_same_lengths(tmp_path):
    data = typed(MIXED, TWO_STATES | {"e": "?" * 13 + "2" + "?" * 6})
    divided = read(tmp_path, "ctype ordered: 14; prset ratepr=variable;", data).partition
    groups = divided.rate_groups
    assert divided.relative_rates.concentration.tolist() == [1.0] * len(groups) and len(groups) < len(divided.subsets)
    assert ("states_2", "ordered_3") in groups
    apart = read(tmp_path, "ctype ordered: 14; unlink brlens=(all);", data)
    assert apart.separate_branch_lengths and apart.partition.length_groups == groups


BY_TYPE_REFUSED = {
    "partition p = 2: 1-8, 9-20;": r"the subset '1' has data of several types \(DNA in 1-6, protein in 7-8\)",
    "prset statefreqpr=dirichlet(1,1);": "dirichlet has 2 numbers instead of 4",
    "prset aamodelpr=mixed;": "there is no model for aamodelpr=mixed",
    "lset coding=nosingletons;": "there is no model for coding=nosingletons",
    "lset applyto=(1) coding=variable;": "there is no model for coding=variable of bases or amino acids",
    "prset aamodelpr=fixed(equalin) statefreqpr=fixed(empirical);": "there is no model for empirical frequencies of",
}


@pytest.mark.filterwarnings("ignore:.*cannot be in data of coding")
@pytest.mark.parametrize("commands", BY_TYPE_REFUSED)
def test_what_is_refused_of_other_types(tmp_path, commands):
    data = typed(MIXED, TWO_STATES | {"e": "?" * 13 + "2" + "?" * 6})
    with pytest.raises(AlignmentError, match=rf"mine\.nex, line 14: .*{BY_TYPE_REFUSED[commands]}.*Remedy") as error:
        read(tmp_path, commands, data)
    assert "HKY85" not in str(error.value) and "F81" not in str(error.value)


def test_states_that_never_occur_have_no_empirical_frequency(tmp_path):
    data = typed("dna", {"a": "AC", "b": "AG"})
    with pytest.raises(AlignmentError, match=r"line 11: '.*': the state T never occurs.*Remedy") as error:
        read(tmp_path, "prset statefreqpr=fixed(empirical);", data)
    assert "HKY85" not in str(error.value)


def test_data_that_no_coding_allows(tmp_path):
    data = typed("standard", {"a": "00", "b": "00", "c": "0?", "d": "00"})
    with pytest.raises(
        AlignmentError, match=r"the characters 1-2 .* of 'all' cannot be .*Remedy: use 'lset coding=all'"
    ):
        read(tmp_path, "lset nst=1;", data)
    two = typed("dna", {"a": "AC", "b": "AC"}).replace("begin mrbayes;\n", "")
    with pytest.raises(AlignmentError, match=r"MrBayes has one matrix, but the file has 2\. Remedy"):
        read(tmp_path, "lset nst=1;", two + two.removeprefix("#NEXUS\n") + "begin mrbayes;\n")
