// A Markov chain over unrooted topologies and branch lengths, at given parameters of the substitution model.
//
// The partial likelihoods of the subtrees behind both ends of every edge are kept, so that a change at one edge leaves
// those that do not see it: a local move computes what lies between it and the move before. A partial likelihood is
// made when it is asked for.
//
// With the partial likelihoods at both ends of an edge, the likelihood of each pattern is a sum of exponentials of the
// edge's length, whose coefficients are computed once; each value and its derivatives are then cheap. Lengths are
// proposed from a gamma distribution that matches the mode and the curvature of their conditional density, found from
// the coefficients alone, so that it does not depend on the present length.
//
// A chain's density lies on a path: the prior times a power of the likelihood, or, given a reference distribution, the
// posterior to a power times the reference to the rest. The reference's gamma distributions of lengths and the prior's
// multiply to gamma distributions, so that proposals of lengths are the same.
//
// Sites may be divided into parts, each with a substitution process of its own; log-likelihoods and their derivatives
// are sums over parts. Each part has one of several sets of branch lengths, which have independent priors of one kind;
// often there is only one set. A part may hold patterns that cannot be in the data: each site of some other part is then
// divided by the probability that none of them occurs.
//
// chains.py says what the arguments are; types and order of the fields of Data and Call must stay as they are there.

#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <numeric>
#include <vector>

#include "lanes.h"

namespace {

using Real = REAL;
constexpr int S = STATES, WIDTH = 64 / sizeof(Real);
using Line = Lanes<Real, WIDTH>;
using Lane = typename Line::Lane;
using Int = std::int64_t;

struct Data {
    Int taxa, patterns;
    const std::uint64_t *masks;  // allowed states, (taxa, patterns)
    const double *weights;       // number of sites, or of patterns of the same probability, (patterns,)
    Int num_parts;
    const Int *part_sizes;      // patterns of each part, which follow each other, (parts,)
    const double *conditioned;  // number of sites without the patterns of this part; 0 for patterns of data, (parts,)
    Int num_sets;
    const Int *part_sets;  // set of branch lengths of each part, (parts,)
    Int num_constraints;
    const std::uint64_t *constraints;  // splits that every tree has, without the first taxon, (constraints, words)
};

struct Call {
    std::int32_t *ends;          // (edges, 2), edge i < taxa ends in tip i
    double *lengths;             // (sets, edges)
    std::uint64_t *random;       // state of the generator, (4,)
    Int *focus;                  // the edge of the last local move
    double *log_likelihood;
    Int *counts;                 // proposed and accepted moves of each kind, (MOVES, 2)
    // Of the rate matrix of each part: (parts, S), (parts, S, S), (parts, S, S), (parts, S).
    const double *eigenvalues, *right, *left, *frequencies;
    const double *rates, *rate_weights;  // of the categories of one part after those of another
    const double *invariant;             // proportion of invariant sites, (parts,)
    const Int *categories;               // (parts,)
    double beta;                         // power of the likelihood
    const void *reference;               // a Reference, or null
    double share;                        // power of the reference; that of the prior is one less the share
    double *log_reference;               // log density of the reference at the state, if there is one
    // log prior density of the lengths t of a set with sum L:
    // (pendant - 1) sum log t + (inner - 1) sum log t - rate L + power log L, over pendant and inner edges
    double pendant, inner, rate, power;
    const double *shares;  // relative frequency of each kind of move, (MOVES,)
    Int steps;
    std::uint64_t *splits;  // taxa on the side of each edge without the first taxon, (edges, words)
    void *room;             // a Room
};

enum Move { LENGTH, EXCHANGE, LIKELIHOOD_REGRAFT, PARSIMONY_REGRAFT, NEAR_REGRAFT, REJOIN, SCALE, INDEPENDENT, MOVES };

// Thrown where no choice has a weight above zero.
struct NoChoice {};

// The generator xoshiro256++ of D. Blackman and S. Vigna (2021).
struct Random {
    std::uint64_t s[4];
    static std::uint64_t turned(std::uint64_t x, int k) { return (x << k) | (x >> (64 - k)); }
    std::uint64_t next() {
        const std::uint64_t result = turned(s[0] + s[3], 23) + s[0], t = s[1] << 17;
        s[2] ^= s[0], s[3] ^= s[1], s[1] ^= s[2], s[0] ^= s[3], s[2] ^= t, s[3] = turned(s[3], 45);
        return result;
    }
    double uniform() { return (double(next() >> 11) + 0.5) * 0x1p-53; }
    Int below(Int count) { return std::min(count - 1, Int(uniform() * double(count))); }
    double normal() { return std::sqrt(-2 * std::log(uniform())) * std::cos(6.283185307179586 * uniform()); }
    // G. Marsaglia and W. W. Tsang (2000).
    double gamma(double shape) {
        if (shape < 1) return gamma(shape + 1) * std::pow(uniform(), 1 / shape);
        const double d = shape - 1.0 / 3, c = 1 / std::sqrt(9 * d);
        while (true) {
            const double x = normal(), v = std::pow(1 + c * x, 3);
            if (v > 0 && std::log(uniform()) < 0.5 * x * x + d - d * v + d * std::log(v)) return d * v;
        }
    }
    template <class Weights> Int choose(const Weights &logs) {
        const double largest = *std::max_element(logs.begin(), logs.end());
        double total = 0;
        for (double one : logs) total += std::exp(one - largest);
        if (!(total > 0)) throw NoChoice();
        double left = total * uniform();
        Int place = 0;
        for (; place + 1 < Int(logs.size()); ++place)
            if ((left -= std::exp(logs[place] - largest)) < 0) break;
        while (!(logs[place] > -HUGE_VAL)) --place;
        return place;
    }
};

double log_sum(const std::vector<double> &logs) {
    const double largest = *std::max_element(logs.begin(), logs.end());
    if (!(largest > -HUGE_VAL)) return largest;
    double total = 0;
    for (double one : logs) total += std::exp(one - largest);
    return largest + std::log(total);
}

// The logarithm of a sum less one of its terms.
double log_others(const std::vector<double> &logs, Int left_out) {
    std::vector<double> others(logs);
    others[left_out] = -HUGE_VAL;
    return log_sum(others);
}

struct Aligned {
    Real *data = nullptr;
    std::size_t size = 0;
    Aligned() = default;
    Aligned(const Aligned &) = delete;
    Aligned(Aligned &&other) noexcept : data(other.data), size(other.size) { other.data = nullptr, other.size = 0; }
    ~Aligned() { std::free(data); }
    void resize(std::size_t wanted) {
        if (wanted <= size) return;
        std::free(data);
        data = static_cast<Real *>(std::aligned_alloc(64, (wanted * sizeof(Real) + 63) / 64 * 64));
        size = data ? wanted : 0;
        if (!data) throw std::bad_alloc();
    }
};

// A distribution over topologies and branch lengths to begin a path of densities with. Seen from the first taxon, each
// set of taxa below an edge (clade) splits into two, independently of what else there is in the tree (conditional clade
// distribution). With one probability it splits as in a sample of trees; with the rest at random: half of the time into
// a clade of the sample and what remains, otherwise as in a uniform distribution over topologies. Lengths of edges have
// gamma distributions given the clade below them.
struct Sample {
    Int taxa, clades, subsplits, num_sets;
    const std::uint64_t *bits;   // clades, without the first taxon, (clades, words)
    const double *shape, *rate;  // of the gamma distributions; the last row is of all other clades, (clades + 1, sets)
    const Int *parent, *child;     // clades, by parent; the child with the parent's first taxon, (subsplits,)
    const double *count;           // (subsplits,)
    Int num_constraints;
    const std::uint64_t *constraints;  // splits that every tree has, (constraints, words)
};

struct LengthDensity {
    double shape, rate, norm;
    LengthDensity(double shape, double rate)
        : shape(shape), rate(rate), norm(shape * std::log(rate) - std::lgamma(shape)) {}
};

class Reference {
    using Set = const std::uint64_t *;
    const Int size, known, num_sets;  // words of a set, clades of the sample, and sets of lengths
    std::vector<std::uint64_t> bits;
    std::vector<Int> table, first, child;  // of a hash table: clades, or -1; subsplits of each clade
    std::vector<LengthDensity> densities;
    std::vector<double> shares, logs, rest;  // of the sample; of all; probability of a split at random, of each clade
    std::vector<Int> num_within, lowest;  // clades of the sample into which each clade can be split; its first taxon
    std::vector<double> log_trees, log_factorials;  // of numbers of taxa: of rooted binary topologies of so many
    std::vector<std::vector<std::uint64_t>> constraints;
    static inline std::atomic<Int> made{0};
    static constexpr double PRIOR_COUNT = 1;  // of splits at random, beside those of the sample

    Set clade(Int number) const { return &bits[number * size]; }
    std::size_t place(Set set) const {
        std::uint64_t hash = 0x9e3779b97f4a7c15;
        for (Int w = 0; w < size; ++w) hash = (hash ^ set[w]) * 0xff51afd7ed558ccd, hash ^= hash >> 32;
        std::size_t at = hash & (table.size() - 1);
        while (table[at] >= 0 && !std::equal(set, set + size, clade(table[at]))) at = (at + 1) & (table.size() - 1);
        return at;
    }
    Int find(Set set) const { return table[place(set)]; }

    // The parts of a clade that constraints keep together: sets of which it holds the whole.
    std::vector<std::vector<std::uint64_t>> parts(Set set) const {
        std::vector<std::vector<std::uint64_t>> found;
        std::vector<std::uint64_t> left(set, set + size);
        std::vector<const std::vector<std::uint64_t> *> inside;
        for (const auto &one : constraints)
            if (holds(set, one.data())) inside.push_back(&one);
        for (const auto *one : inside) {
            const auto within = [&](const auto *other) { return holds(other->data(), one->data()); };
            if (std::any_of(inside.begin(), inside.end(), within)) continue;
            found.push_back(*one);
            for (Int w = 0; w < size; ++w) left[w] &= ~(*one)[w];
        }
        for (Int taxon = 0; taxon < 64 * size; ++taxon)
            if (has(left.data(), taxon)) {
                found.emplace_back(size, 0);
                found.back()[taxon / 64] = std::uint64_t(1) << (taxon % 64);
            }
        return found;
    }
    std::vector<std::vector<std::uint64_t>> units_of(Set set) const {
        return constraints.empty() ? std::vector<std::vector<std::uint64_t>>{} : parts(set);
    }
    // Clades of the sample into which a set can be split, given the parts that stay together.
    template <class Visit>
    void visit_within(Set set, const std::vector<std::vector<std::uint64_t>> &units, Visit visit) const {
        for (Int k = 0; k < known; ++k) {
            if (!has(set, lowest[k]) || !holds(set, clade(k))) continue;
            const auto broken = [&](const auto &unit) { return holds(unit.data(), clade(k)); };
            if (!std::any_of(units.begin(), units.end(), broken)) visit(k);
        }
    }
    Int count_within(Set set, const std::vector<std::vector<std::uint64_t>> &units) const {
        Int total = 0;
        visit_within(set, units, [&](Int) { ++total; });
        return total;
    }
    // Probability of a split at random; the parts that constraints keep together are listed if there are any.
    double random_split(Set set, Set one) const {
        std::vector<std::uint64_t> other(set, set + size);
        for (Int w = 0; w < size; ++w) other[w] &= ~one[w];
        std::vector<std::vector<std::uint64_t>> units;
        Int all = count(set), some = count(one);
        if (!constraints.empty()) {
            units = parts(set);
            all = Int(units.size());
            const auto inside = [&](const auto &unit) { return !disjoint(unit.data(), one); };
            some = std::count_if(units.begin(), units.end(), inside);
        }
        const Int k = find(set), total = k < 0 ? count_within(set, units) : num_within[k];
        const double known = double((find(one) >= 0) + (find(other.data()) >= 0)) / double(total);
        return 0.5 * known + 0.5 * std::exp(log_trees[some] + log_trees[all - some] - log_trees[all]);
    }
    Int count(Set set) const {
        Int sum = 0;
        for (Int w = 0; w < size; ++w) sum += __builtin_popcountll(set[w]);
        return sum;
    }
    bool disjoint(Set one, Set other) const {
        for (Int w = 0; w < size; ++w)
            if (one[w] & other[w]) return false;
        return true;
    }
    // Whether a set holds another one, and more.
    bool holds(Set one, Set other) const {
        bool equal = true;
        for (Int w = 0; w < size; ++w) {
            if (other[w] & ~one[w]) return false;
            equal = equal && other[w] == one[w];
        }
        return !equal;
    }

  public:
    static bool has(Set set, Int taxon) { return (set[taxon / 64] >> (taxon % 64)) & 1; }
    static Int first_of(Set set) {
        Int w = 0;
        while (!set[w]) ++w;
        return 64 * w + __builtin_ctzll(set[w]);
    }

    const Int number = ++made;  // which tells references apart

    explicit Reference(const Sample &sample)
        : size((sample.taxa + 63) / 64), known(sample.clades), num_sets(sample.num_sets),
          bits(sample.bits, sample.bits + sample.clades * size),
          first(sample.clades + 1, 0), child(sample.child, sample.child + sample.subsplits), shares(sample.subsplits),
          logs(sample.subsplits), rest(sample.clades, 1) {
        std::size_t room = 16;
        while (room < 4 * std::size_t(sample.clades)) room *= 2;
        table.assign(room, -1);
        for (Int k = 0; k < sample.num_constraints; ++k)
            constraints.emplace_back(sample.constraints + k * size, sample.constraints + (k + 1) * size);
        for (Int k = 0; k < sample.clades; ++k) table[place(clade(k))] = k;
        const Int num_densities = (sample.clades + 1) * num_sets;
        for (Int k = 0; k < num_densities; ++k) densities.emplace_back(sample.shape[k], sample.rate[k]);
        for (Int s = 0; s < sample.subsplits; ++s) ++first[sample.parent[s] + 1];
        std::partial_sum(first.begin(), first.end(), first.begin());
        for (Int k = 0; k < sample.clades; ++k) lowest.push_back(first_of(clade(k)));
        for (Int k = 0; k < sample.clades; ++k) num_within.push_back(count_within(clade(k), units_of(clade(k))));
        for (Int k = 0; k <= sample.taxa; ++k) {
            const double taxa = double(k);
            log_factorials.push_back(std::lgamma(taxa + 1));
            log_trees.push_back(k < 3 ? 0 : std::lgamma(2 * taxa - 1) - (taxa - 1) * LOG_2 - std::lgamma(taxa));
        }
        for (Int k = 0; k < sample.clades; ++k) {
            double total = PRIOR_COUNT;
            for (Int s = first[k]; s < first[k + 1]; ++s) total += sample.count[s];
            rest[k] = PRIOR_COUNT / total;
            for (Int s = first[k]; s < first[k + 1]; ++s) {
                shares[s] = sample.count[s] / total;
                logs[s] = std::log(shares[s] + rest[k] * random_split(clade(k), clade(child[s])));
            }
        }
    }

    // Densities of the lengths of an edge in each set of lengths.
    const LengthDensity *of_lengths(Set set) const {
        const Int k = find(set);
        return &densities[(k < 0 ? known : k) * num_sets];
    }
    double norm(const LengthDensity *of_sets) const {
        double sum = 0;
        for (Int set = 0; set < num_sets; ++set) sum += of_sets[set].norm;
        return sum;
    }
    double log_split(Set set, Set one, Set other) const {
        const Int k = find(set);
        if (k < 0) return std::log(random_split(set, one));
        const Int part = find(has(one, first_of(set)) ? one : other);
        for (Int s = first[k]; s < first[k + 1]; ++s)
            if (child[s] == part) return logs[s];
        return std::log(rest[k] * random_split(set, one));
    }
    std::vector<std::uint64_t> split(Set set, Random &random) const {
        const Int k = find(set);
        if (k >= 0) {
            double left = random.uniform();
            for (Int s = first[k]; s < first[k + 1]; ++s)
                if ((left -= shares[s]) < 0) return {clade(child[s]), clade(child[s]) + size};
        }
        const auto units = units_of(set);
        if (random.uniform() < 0.5) {
            std::vector<Int> within;
            visit_within(set, units, [&](Int one) { within.push_back(one); });
            const Int one = within[random.below(Int(within.size()))];
            return {clade(one), clade(one) + size};
        }
        const Int all = constraints.empty() ? count(set) : Int(units.size());
        std::vector<double> weights;
        for (Int some = 1; some < all; ++some)
            weights.push_back(log_trees[some] + log_trees[all - some] + log_factorials[all] - log_factorials[some] -
                              log_factorials[all - some]);
        Int some = 1 + random.choose(weights), left = all;
        std::vector<std::uint64_t> one(size, 0);
        const auto is_taken = [&] { return random.below(left--) < some && some-- > 0; };
        for (Int unit = 0; some > 0 && unit < Int(units.size()); ++unit)
            if (is_taken())
                for (Int w = 0; w < size; ++w) one[w] |= units[unit][w];
        for (Int taxon = 0; some > 0; ++taxon)
            if (has(set, taxon) && is_taken()) one[taxon / 64] |= std::uint64_t(1) << (taxon % 64);
        return one;
    }
};

// Log density of a gamma distribution.
double log_gamma_density(double x, double shape, double rate) {
    return shape * std::log(rate) + (shape - 1) * std::log(x) - rate * x - std::lgamma(shape);
}

// Partial likelihoods: `states` (categories, S, width) with exponents of two (width,), or those of a tip.
struct Partial {
    const Real *states, *exponents;  // a tip has the same states in each category, and no exponents
    bool tip;
};

// Lengths of an edge in each set of lengths.
using Times = std::vector<double>;

// A tree, with what the reference says about its edges and its topology.
struct Tree {
    std::vector<std::array<std::int32_t, 3>> neighbour, edge_at;
    std::vector<std::array<std::int32_t, 2>> ends;
    std::vector<double> length;  // (edges, sets)
    std::vector<std::uint8_t> locked;  // edges whose split has to stay
    std::vector<std::uint64_t> below;  // taxa below each edge, seen from the first taxon, (edges, words)
    std::vector<std::uint64_t> halves;  // of these taxa, those on the side of the first one at the edge's lower node
    std::vector<double> split_logs, norms;  // of the split of these taxa, and of the densities of the lengths
    std::vector<double> reference_shape, reference_rate;  // (edges, sets)
    double reference_log = 0;  // of the topology, with the constants of the densities of the lengths
};

// Sites with a substitution process of their own: patterns `first` to `last`, whole vectors.
struct Part {
    Int first, last, single;  // patterns before `single` are those of one site each
    Int set = 0;              // of lengths
    double conditioned = 0;   // number of sites that are none of the patterns
    Int categories = 0, distinct = 0;
    std::vector<double> eigenvalues, right, left, frequencies, rates, rate_weights;
    double invariant = 0;
    std::vector<int> rank;                // number of the distinct eigenvalue of each
    std::vector<double> exponents;        // distinct eigenvalues times rates, (categories, distinct)
    std::vector<Real> at_left, at_right;  // transforms of both ends, (S, S)
};

// Room for partial likelihoods, kept by a chain, or lent to one chain after another.
struct Room {
    const void *tenant = nullptr;  // the chain whose they are
    std::vector<Aligned> blocks;   // 3 of each inner node: the subtree away from each neighbour
    std::vector<Aligned> spare;    // those of a tree before a move
    std::vector<Aligned> incoming[2];  // of candidate places, for each side
};

class Chain : Tree {
    const Int n, edges, nodes, patterns, num_sets, width;  // width: patterns, those of each part padded to whole vectors
    Room *room = nullptr;
    std::vector<char> valid;  // which of the blocks
    std::vector<Aligned> tips;
    Aligned weights, constant, coefficients, scratch, first_side, second_side;
    const Reference *reference = nullptr;
    double share = 0;
    Tree kept;  // the tree before a move
    // the model
    std::vector<Part> parts;
    Int most_categories = 0, most_terms = 0;  // of a part
    std::vector<Real> matrices[2];
    double beta = 1, pendant = 1, inner = 1, rate = 10, power = 0;
    Random random;
    // parsimony
    Int words = 0;
    std::vector<std::uint64_t> tip_sets;  // (taxa, S, words)
    std::vector<std::uint64_t> sets;      // (inner nodes, 3, S, words)
    std::vector<char> known;              // which of them
    Int focus = 0;
    Int *counts = nullptr;

    Int block_size() const { return (most_categories * S + 1) * width; }
    bool is_tip(Int node) const { return node < n; }
    int slot(Int node, Int edge) const {
        const auto &at = edge_at[node];
        return is_tip(node) || at[0] == edge ? 0 : at[1] == edge ? 1 : 2;
    }
    Int other_end(Int edge, Int node) const { return ends[edge][0] == node ? ends[edge][1] : ends[edge][0]; }
    // Prior and reference of a length together: a gamma distribution but for a constant.
    double shape_of(Int edge, Int set) const {
        return mixed(edge < n ? pendant : inner, reference_shape[edge * num_sets + set]);
    }
    double rate_of(Int edge, Int set) const { return mixed(rate, reference_rate[edge * num_sets + set]); }
    const double *times(Int edge) const { return &length[edge * num_sets]; }
    double *times(Int edge) { return &length[edge * num_sets]; }
    static bool possible(double time) { return time > 1e-30 && time < 1e6; }
    double mixed(double own, double other) const { return share > 0 ? (1 - share) * own + share * other : own; }

    // Partial likelihoods.

    static void fill(const Part &part, double time, std::vector<Real> &matrix) {
        matrix.resize(part.categories * S * S);
        const double *right = part.right.data(), *left = part.left.data();
        double powers[S];
        for (Int c = 0; c < part.categories; ++c) {
            for (int k = 0; k < S; ++k) powers[k] = std::exp(part.eigenvalues[k] * part.rates[c] * time);
            for (int i = 0; i < S; ++i)
                for (int j = 0; j < S; ++j) {
                    double sum = 0;
                    for (int k = 0; k < S; ++k) sum += right[i * S + k] * powers[k] * left[k * S + j];
                    matrix[(c * S + i) * S + j] = Real(std::max(sum, 0.0));
                }
        }
    }

    static void apply(const Real *matrix, const Lane *from, Lane *to) {
        for (int i = 0; i < S; ++i) {
            Lane sum = from[0] * matrix[i * S];
            for (int j = 1; j < S; ++j) sum += from[j] * matrix[i * S + j];
            to[i] = sum;
        }
    }

    static void load_states(const Real *place, Int width, Lane *states) {
        for (int i = 0; i < S; ++i) states[i] = load<Lane>(place + i * width);
    }

    static Lane largest(Lane a, Lane b) { return a > b ? a : b; }

    // Where two subtrees meet, at the other ends of edges of lengths `one_times` and `other_times`, of each set.
    void join(const Partial &one, const double *one_times, const Partial &other, const double *other_times, Real *out) {
        for (const Part &part : parts) join_part(part, one, one_times[part.set], other, other_times[part.set], out);
    }
    void join_part(const Part &part, const Partial &one, double one_time, const Partial &other, double other_time,
                   Real *out) {
        fill(part, one_time, matrices[0]);
        fill(part, other_time, matrices[1]);
        const Int categories = part.categories;
        std::vector<Lane> &kept = lanes;
        kept.resize(categories * S);
        for (Int g = part.first; g < part.last; g += WIDTH) {
            Lane high{};
            for (Int c = 0; c < categories; ++c) {
                Lane x[S], y[S], sent[S];
                load_states(one.states + (one.tip ? 0 : c * S * width) + g, width, x);
                apply(matrices[0].data() + c * S * S, x, sent);
                load_states(other.states + (other.tip ? 0 : c * S * width) + g, width, x);
                apply(matrices[1].data() + c * S * S, x, y);
                for (int i = 0; i < S; ++i) {
                    const Lane product = sent[i] * y[i];
                    kept[c * S + i] = product;
                    high = largest(high, product);
                }
            }
            const auto shift = exponent_of<Format<Real>, typename Line::Words>(high);
            const Lane inverse = two_to<Format<Real>, Lane>(-shift);
            for (Int k = 0; k < categories * S; ++k) store(out + k * width + g, kept[k] * inverse);
            Lane power = convert<Lane>(shift);
            if (!one.tip) power += load<Lane>(one.exponents + g);
            if (!other.tip) power += load<Lane>(other.exponents + g);
            store(out + most_categories * S * width + g, power);
        }
    }
    std::vector<Lane> lanes;
    static void store(Real *place, const Lane &value) { std::memcpy(place, &value, sizeof value); }

    Partial as_partial(const Real *block) const { return {block, block + most_categories * S * width, false}; }
    Partial held(Int node, int k) const {
        return is_tip(node) ? Partial{tips[node].data, nullptr, true} : as_partial(room->blocks[3 * (node - n) + k].data);
    }

    // The subtree behind `node`, as seen through its edge `edge`.
    Partial behind(Int node, Int edge) {
        if (is_tip(node)) return held(node, 0);
        const int k = slot(node, edge);
        const Int place = 3 * (node - n) + k;
        if (!valid[place]) {
            const int a = (k + 1) % 3, b = (k + 2) % 3;
            const Int ea = edge_at[node][a], eb = edge_at[node][b];
            const Partial one = behind(neighbour[node][a], ea), other = behind(neighbour[node][b], eb);
            room->blocks[place].resize(block_size());
            // The sum must not depend on the order of the neighbours.
            join(one, times(ea), other, times(eb), room->blocks[place].data);
            valid[place] = 1;
        }
        return held(node, k);
    }

    // Forget all subtrees that hold an edge; `both` forgets those on either side of it, too. What a length leaves, and a
    // topology does not, are the sets of states.
    void forget(Int edge, bool both, bool topology) {
        for (int side = 0; side < 2; ++side) {
            const Int node = ends[edge][side];
            if (both && !is_tip(node)) forget_block(3 * (node - n) + slot(node, edge), topology);
            forget_from(node, edge, topology);
        }
    }
    void forget_block(Int place, bool topology) {
        valid[place] = 0;
        if (topology) known[place] = 0;
    }
    void forget_from(Int node, Int edge, bool topology) {
        if (is_tip(node)) return;
        const int toward = slot(node, edge);
        for (int k = 0; k < 3; ++k)
            if (k != toward) {
                forget_block(3 * (node - n) + k, topology);
                forget_from(neighbour[node][k], edge_at[node][k], topology);
            }
    }
    void forget_all() { std::fill(valid.begin(), valid.end(), 0); }
    void forget_topology() { forget_all(), std::fill(known.begin(), known.end(), 0); }

    // The likelihood as a function of the lengths of one edge, of which each part sees one.

    struct Values {
        double value, first, second;
    };

    // Likelihoods of a pattern below the smallest count as it, so that a product of a few of them is a number.
    static constexpr int MOST_FACTORS = 3;
    static constexpr Real SMALLEST = sizeof(Real) == 4 ? Real(1e-12) : Real(1e-100);

    // Coefficients of the exponentials for an edge between two subtrees, (categories * distinct + 1, width).
    void expand(const Partial &one, const Partial &other, Aligned &out) {
        out.resize((most_terms + 1) * width);
        for (const Part &part : parts) expand_part(part, one, other, out);
    }
    void expand_part(const Part &part, const Partial &one, const Partial &other, Aligned &out) {
        const Int categories = part.categories, distinct = part.distinct;
        const Real *at_left = part.at_left.data(), *at_right = part.at_right.data();
        const int *rank = part.rank.data();
        for (Int g = part.first; g < part.last; g += WIDTH) {
            for (Int c = 0; c < categories; ++c) {
                Lane x[S], u[S], v[S], sums[S];
                load_states(one.states + (one.tip ? 0 : c * S * width) + g, width, x);
                apply(at_left, x, u);
                load_states(other.states + (other.tip ? 0 : c * S * width) + g, width, x);
                apply(at_right, x, v);
                for (Int d = 0; d < distinct; ++d) sums[d] = Lane{};
                for (int k = 0; k < S; ++k) sums[rank[k]] += u[k] * v[k];
                for (Int d = 0; d < distinct; ++d)
                    store(out.data + (c * distinct + d) * width + g, sums[d] * Real(part.rate_weights[c]));
            }
            Lane power{};
            if (!one.tip) power += load<Lane>(one.exponents + g);
            if (!other.tip) power += load<Lane>(other.exponents + g);
            store(out.data + categories * distinct * width + g, power);
        }
    }

    Lane unchanging(Lane power, Int g, double invariant) const {
        // Powers of two of exponents, which are whole numbers; below the smallest number, none.
        using Words = typename Line::Words;
        const Lane limit = Lane{} + Real(1 - Format<Real>::bias), top = Lane{} - limit;
        const Lane bounded = -power < limit ? limit : -power > top ? top : -power;
        return load<Lane>(constant.data + g) * two_to<Format<Real>, Lane>(convert<Words>(bounded)) * Real(invariant);
    }

    // Sums over patterns, before those over lanes.
    struct Totals {
        double value[WIDTH] = {};
        Lane first{}, second{}, powers_of_two{}, product = Lane{} + Real(1);
    };

    // Of the parts with one set of lengths.
    template <bool values, bool derivatives> Values evaluate(const Aligned &terms, double time, Int set) const {
        Totals sums;
        Values result{0, 0, 0};
        for (const Part &part : parts)
            if (part.set != set)
                continue;
            else if (part.conditioned > 0)
                condition(part, terms, time, result);
            else
                add_part<values, derivatives>(part, terms, time, sums);
        if constexpr (values) {
            const Lane rest = logarithm<Line>(sums.product);
            for (int v = 0; v < WIDTH; ++v) sums.value[v] += double(rest[v]) + LOG_2 * double(sums.powers_of_two[v]);
        }
        for (int v = 0; v < WIDTH; ++v)
            result.value += sums.value[v], result.first += double(sums.first[v]), result.second += double(sums.second[v]);
        return result;
    }

    // Of all parts.
    double value(const Aligned &terms, const double *of_sets) const {
        double sum = 0;
        for (Int set = 0; set < num_sets; ++set) sum += evaluate<true, false>(terms, of_sets[set], set).value;
        return sum;
    }

    template <bool values, bool derivatives>
    void add_part(const Part &part, const Aligned &terms, double time, Totals &sums) const {
        const Int count = part.categories * part.distinct, single = part.single;
        const double invariant = part.invariant, *exponents = part.exponents.data();
        constexpr int MOST = 4096;
        Real powers[MOST], slopes[MOST], curves[MOST];
        for (Int k = 0; k < count; ++k) {
            const double size = std::exp(exponents[k] * time);
            powers[k] = Real(size), slopes[k] = Real(size * exponents[k]);
            curves[k] = Real(size * exponents[k] * exponents[k]);
        }
        Lane first = sums.first, second = sums.second, powers_of_two = sums.powers_of_two, product = sums.product;
        int factors = 0;
        for (Int g = part.first; g < part.last; g += WIDTH) {
            Lane site{}, slope{}, curve{};
            for (Int k = 0; k < count; ++k) {
                const Lane term = load<Lane>(terms.data + k * width + g);
                site += term * powers[k];
                if constexpr (derivatives) slope += term * slopes[k], curve += term * curves[k];
            }
            const Lane power = load<Lane>(terms.data + count * width + g), weight = load<Lane>(weights.data + g);
            if (invariant > 0) site += unchanging(power, g, invariant);
            const Lane smallest = Lane{} + SMALLEST;
            site = site > smallest ? site : smallest;
            if constexpr (values) {
                powers_of_two += power * weight;
                if (g < single) {
                    // The logarithm of a product, whose exponent is taken out before it becomes too small.
                    product *= site;
                    if (++factors == MOST_FACTORS || g + WIDTH >= single) {
                        const auto shift = exponent_of<Format<Real>, typename Line::Words>(product);
                        product *= two_to<Format<Real>, Lane>(-shift);
                        powers_of_two += convert<Lane>(shift);
                        factors = 0;
                    }
                } else {
                    const Lane log = logarithm<Line>(site) * weight;
                    for (int v = 0; v < WIDTH; ++v) sums.value[v] += double(log[v]);
                }
            }
            if constexpr (derivatives) {
                const Lane inverse = 1 / site, ratio = slope * inverse;
                first += ratio * weight, second += (curve * inverse - ratio * ratio) * weight;
            }
        }
        sums.first = first, sums.second = second, sums.powers_of_two = powers_of_two, sums.product = product;
    }

    // Divide sites by the probability of not being one of the patterns of a part.
    void condition(const Part &part, const Aligned &terms, double time, Values &result) const {
        const Int count = part.categories * part.distinct;
        double total = 0, slope = 0, curve = 0;
        for (Int g = part.first; g < part.last; ++g) {
            const double scale = double(weights.data[g]) * std::exp2(double(terms.data[count * width + g]));
            for (Int k = 0; k < count; ++k) {
                const double rate = part.exponents[k];
                const double term = scale * double(terms.data[k * width + g]) * std::exp(rate * time);
                total += term, slope += rate * term, curve += rate * rate * term;
            }
        }
        const double other = std::max(1 - total, LEAST_OTHER), ratio = slope / other;
        result.value -= part.conditioned * std::log(other);
        result.first += part.conditioned * ratio;
        result.second += part.conditioned * (curve / other + ratio * ratio);
    }
    // Smallest probability of the sites that can be in the data; that of a tree without lengths is zero.
    static constexpr double LEAST_OTHER = 1e-15;

    // A proposal of one length: a gamma distribution at the mode of the logarithm, and a wide one.
    struct Fit {
        double shape, rate, wide_shape, wide_rate, log_mass;
        double draw(Random &random) const {
            return random.uniform() < 0.9 ? random.gamma(shape) / rate : random.gamma(wide_shape) / wide_rate;
        }
        double log_density(double time) const {
            const double near = std::log(0.9) + log_gamma_density(time, shape, rate);
            const double wide = std::log(0.1) + log_gamma_density(time, wide_shape, wide_rate);
            return std::max(near, wide) + std::log1p(std::exp(-std::abs(near - wide)));
        }
    };
    // `prior_shape` and `prior_rate` of the length's prior; the mode is sought from the same start always.
    Fit fit(const Aligned &terms, double prior_shape, double prior_rate, Int set) const {
        double y = std::log(0.02), bend = 1;
        for (int round = 0; round < 20; ++round) {
            const double time = std::exp(y);
            const Values at = evaluate<false, true>(terms, time, set);
            const double tilt = time * (beta * at.first - prior_rate);
            const double slope = tilt + prior_shape;
            const double curve = tilt + time * time * beta * at.second;
            bend = std::max(-curve, 0.3 * prior_shape);
            double step = curve < -0.05 ? -slope / curve : slope > 0 ? 1.5 : -1.5;
            step = std::clamp(step, -2.5, 2.5);
            if (std::abs(step) < 0.1 || round == 19) break;
            y = std::clamp(y + step, -16.0, 4.0);
        }
        const double mode = std::exp(y), shape = std::min(bend, 1e6);
        const double height = beta * evaluate<true, false>(terms, mode, set).value + prior_shape * y - prior_rate * mode;
        return {shape, shape / mode, prior_shape, std::min(prior_shape / mode, 1e8),
                height + std::lgamma(shape) + shape - shape * std::log(shape)};
    }

    double sum_of_lengths(Int set) const {
        double sum = 0;
        for (Int e = 0; e < edges; ++e) sum += times(e)[set];
        return sum;
    }
    // Rate of one length given the sum of the others.
    double rate_given(double own, double others) const { return own - power / (others + 0.05); }
    static double log_prior(double time, double shape, double rate) { return (shape - 1) * std::log(time) - rate * time; }
    // Log density of prior and reference at the tree.
    double log_prior_of_tree() const {
        double sum = share * reference_log;
        for (Int set = 0; set < num_sets; ++set) {
            sum += power * std::log(sum_of_lengths(set));
            for (Int e = 0; e < edges; ++e) sum += log_prior(times(e)[set], shape_of(e, set), rate_of(e, set));
        }
        return sum;
    }

    // Look up the tree in the reference; what is known of splits that have stayed is kept.
    void refer() {
        if (referred != reference->number) {
            const Int size = (n + 63) / 64;
            below.assign(edges * size, 0), halves.assign(edges * size, 0);
            split_logs.assign(edges, 0), norms.assign(edges, 0);
            referred = reference->number;
        }
        reference_log = 0;
        refer_from(neighbour[0][0], 0, (n + 63) / 64);
    }
    Int referred = 0;  // number of the reference in which splits were looked up
    void refer_from(Int node, Int edge, Int size) {
        std::uint64_t *own = &below[edge * size], *half = &halves[edge * size];
        bool same = true;
        const auto put = [&](std::uint64_t *word, std::uint64_t value) { same = same && *word == value, *word = value; };
        if (is_tip(node)) {
            put(own + node / 64, std::uint64_t(1) << (node % 64));
        } else {
            const int k = slot(node, edge);
            const Int one = edge_at[node][(k + 1) % 3], other = edge_at[node][(k + 2) % 3];
            refer_from(neighbour[node][(k + 1) % 3], one, size);
            refer_from(neighbour[node][(k + 2) % 3], other, size);
            const std::uint64_t *a = &below[one * size], *b = &below[other * size];
            for (Int w = 0; w < size; ++w) put(own + w, a[w] | b[w]);
            const std::uint64_t *first = Reference::has(a, Reference::first_of(own)) ? a : b;
            for (Int w = 0; w < size; ++w) put(half + w, first[w]);
            if (!same) split_logs[edge] = reference->log_split(own, a, b);
            reference_log += split_logs[edge];
        }
        if (!same) {
            const LengthDensity *densities = reference->of_lengths(own);
            for (Int set = 0; set < num_sets; ++set) {
                reference_shape[edge * num_sets + set] = densities[set].shape;
                reference_rate[edge * num_sets + set] = densities[set].rate;
            }
            norms[edge] = reference->norm(densities);
        }
        reference_log += norms[edge];
    }

    bool decide(Move move, double log_ratio) {
        counts[2 * move] += 1;
        const bool yes = log_ratio >= 0 || std::log(random.uniform()) < log_ratio;
        counts[2 * move + 1] += yes;
        return yes;
    }

    // Moves.

    void walk() {
        if (random.uniform() < 0.5) {
            focus = random.below(edges);
            return;
        }
        const Int node = ends[focus][random.below(2)];
        const int turn = 1 + int(random.below(2));
        if (!is_tip(node)) focus = edge_at[node][(slot(node, focus) + turn) % 3];
    }

    // New lengths of one edge: given the others, those of the sets are independent.
    void resample(Int edge) {
        expand(behind(ends[edge][0], edge), behind(ends[edge][1], edge), coefficients);
        bool changed = false;
        for (Int set = 0; set < num_sets; ++set) changed = resample(edge, set) || changed;
        if (changed) forget(edge, false, false);
    }
    bool resample(Int edge, Int set) {
        double &length = times(edge)[set];
        const double old = length, shape = shape_of(edge, set), own = rate_of(edge, set);
        const double others = sum_of_lengths(set) - old;
        double proposed, ratio;
        if (random.uniform() < 0.2) {
            const double step = 2 * (random.uniform() - 0.5);
            proposed = old * std::exp(step);
            ratio = step;
        } else {
            const Fit found = fit(coefficients, shape, rate_given(own, others), set);
            proposed = found.draw(random);
            ratio = found.log_density(old) - found.log_density(proposed);
        }
        if (!possible(proposed)) return false;
        ratio += beta * (evaluate<true, false>(coefficients, proposed, set).value -
                         evaluate<true, false>(coefficients, old, set).value) +
                 log_prior(proposed, shape, own) - log_prior(old, shape, own) +
                 power * std::log((others + proposed) / (others + old));
        if (!decide(LENGTH, ratio)) return false;
        length = proposed;
        return true;
    }

    // One of the three topologies around an inner edge, and its lengths, chosen by their approximate masses.
    void exchange(Int edge) {
        const Int u = ends[edge][0], v = ends[edge][1];
        const int at_u = slot(u, edge), at_v = slot(v, edge);
        const Int a = edge_at[u][(at_u + 1) % 3], b = edge_at[u][(at_u + 2) % 3];
        const Int c = edge_at[v][(at_v + 1) % 3], d = edge_at[v][(at_v + 2) % 3];
        const Partial pa = behind(other_end(a, u), a), pb = behind(other_end(b, u), b);
        const Partial pc = behind(other_end(c, v), c), pd = behind(other_end(d, v), d);
        Aligned *terms[3] = {&coefficients, &more[0], &more[1]};
        expand(behind(u, edge), behind(v, edge), coefficients);
        first_side.resize(block_size()), second_side.resize(block_size());
        join(pa, times(a), pc, times(c), first_side.data);
        join(pb, times(b), pd, times(d), second_side.data);
        expand(as_partial(first_side.data), as_partial(second_side.data), more[0]);
        join(pa, times(a), pd, times(d), first_side.data);
        join(pb, times(b), pc, times(c), second_side.data);
        expand(as_partial(first_side.data), as_partial(second_side.data), more[1]);
        std::array<Middle, 3> middles{};
        if (share > 0) middles = refer_around(a, b, c, d);
        std::vector<Fit> fits;  // (topologies, sets)
        std::vector<double> masses(3);
        const Times old(times(edge), times(edge) + num_sets);
        Times others, proposed;
        for (Int set = 0; set < num_sets; ++set) others.push_back(sum_of_lengths(set) - old[set]);
        for (Int k = 0; k < 3; ++k) {
            for (Int set = 0; set < num_sets; ++set) {
                const double own = rate_given(middle_rate(middles[k], set), others[set]);
                fits.push_back(fit(*terms[k], middle_shape(middles[k], set), own, set));
                masses[k] += fits.back().log_mass;
            }
            masses[k] += middles[k].log;
        }
        const Int chosen = random.choose(masses);
        for (Int set = 0; set < num_sets; ++set) {
            proposed.push_back(fits[chosen * num_sets + set].draw(random));
            if (!possible(proposed.back())) return;
        }
        const auto weight = [&](Int k, const Times &at) {
            double sum = beta * value(*terms[k], at.data()) + middles[k].log;
            for (Int set = 0; set < num_sets; ++set)
                sum = sum + log_prior(at[set], middle_shape(middles[k], set), middle_rate(middles[k], set)) +
                      power * std::log(others[set] + at[set]) - fits[k * num_sets + set].log_density(at[set]);
            return sum - masses[k];
        };
        if (!decide(EXCHANGE, weight(chosen, proposed) - weight(0, old))) return;
        std::copy(proposed.begin(), proposed.end(), times(edge));
        if (chosen == 0) {
            forget(edge, false, false);
            return;
        }
        // First b and c change places, or b and d.
        const Int moved = chosen == 1 ? c : d;
        const Int x = other_end(b, u), y = other_end(moved, v);
        const int bu = slot(u, b), mv = slot(v, moved);
        neighbour[u][bu] = y, edge_at[u][bu] = moved;
        neighbour[v][mv] = x, edge_at[v][mv] = b;
        neighbour[x][slot(x, b)] = v, neighbour[y][slot(y, moved)] = u;
        ends[b] = {std::int32_t(x), std::int32_t(v)}, ends[moved] = {std::int32_t(y), std::int32_t(u)};
        forget(edge, true, true);
        if (share > 0) refer();
    }
    Aligned more[2];

    // Prior and reference of the edge between four subtrees, of which the first and another one lie on one side.
    struct Middle {
        const LengthDensity *densities = nullptr;  // of the reference, if it has a share
        double log = 0;
    };
    double middle_shape(const Middle &one, Int set) const {
        return mixed(inner, share > 0 ? one.densities[set].shape : 0);
    }
    double middle_rate(const Middle &one, Int set) const { return mixed(rate, share > 0 ? one.densities[set].rate : 0); }
    std::array<Middle, 3> refer_around(Int a, Int b, Int c, Int d) const {
        const Int size = (n + 63) / 64;
        const auto set = [&](Int edge) { return &below[edge * size]; };
        const auto count = [&](Int edge) {
            Int sum = 0;
            for (Int w = 0; w < size; ++w) sum += __builtin_popcountll(set(edge)[w]);
            return sum;
        };
        // The edge towards the first taxon is the one above all others.
        const std::array<Int, 4> around{a, b, c, d};
        const auto larger = [&](Int one, Int other) { return count(one) < count(other); };
        const Int top = std::max_element(around.begin(), around.end(), larger) - around.begin();
        std::vector<std::uint64_t> inside(size);
        const auto middle = [&](std::array<int, 4> order) {
            // Places of the edges: the first two on one side.
            const int at = int(std::find(order.begin(), order.end(), int(top)) - order.begin());
            const Int beside = around[order[at ^ 1]];
            const Int one = around[order[(at ^ 2) & 2]], other = around[order[(at ^ 2) | 1]];
            for (Int w = 0; w < size; ++w) inside[w] = set(one)[w] | set(other)[w];
            const LengthDensity *densities = reference->of_lengths(inside.data());
            const double log = reference->log_split(set(around[top]), set(beside), inside.data()) +
                               reference->log_split(inside.data(), set(one), set(other));
            return Middle{densities, share * (reference->norm(densities) + log)};
        };
        return {middle({0, 1, 2, 3}), middle({0, 2, 1, 3}), middle({0, 3, 1, 2})};
    }

    // Places to which a side of a cut edge can be joined again. Without the node of the cut, its two other edges are
    // one; place 0 is this edge. Further places lie behind its two ends.
    struct Place {
        Int edge, near, far;
        Int before;          // the place through which this one was reached
        Int sibling, aside;  // the other edge at the near node, and the node behind it
        Int steps;           // from place 0
        bool made;
    };
    struct Side {
        Int node, cut, x, y, ex, ey;  // the node at the cut edge, its other neighbours and edges
        Times time;                   // the sums of both lengths
        std::vector<Place> places;
    };

    Side side_of(Int node, Int cut) {
        Side side;
        const int k = slot(node, cut);
        const int a = (k + 1) % 3, b = (k + 2) % 3;
        side.node = node, side.cut = cut;
        side.x = neighbour[node][a], side.y = neighbour[node][b];
        side.ex = edge_at[node][a], side.ey = edge_at[node][b];
        for (Int set = 0; set < num_sets; ++set) side.time.push_back(times(side.ex)[set] + times(side.ey)[set]);
        side.places.push_back({side.ex, side.x, side.y, -1, -1, -1, 0, true});
        if (!locked[side.ex]) reach(side, 0, side.x, side.ex);
        if (!locked[side.ey]) reach(side, 0, side.y, side.ey);
        return side;
    }
    void reach(Side &side, Int before, Int node, Int through) {
        if (is_tip(node)) return;
        const int k = slot(node, through);
        for (int turn = 1; turn < 3; ++turn) {
            const int one = (k + turn) % 3, other = (k + 3 - turn) % 3;
            const Int edge = edge_at[node][one], far = neighbour[node][one];
            const Int number = Int(side.places.size());
            side.places.push_back({edge, node, far, before, edge_at[node][other], neighbour[node][other],
                                   side.places[before].steps + 1, false});
            if (!locked[edge]) reach(side, number, far, edge);
        }
    }

    const double *times_at(const Side &side, Int place) const {
        return place == 0 ? side.time.data() : times(side.places[place].edge);
    }
    // Lengths of both ends of a place, of which `part` is that of the near end.
    std::array<Times, 2> divided(const double *whole, const Times &part) const {
        std::array<Times, 2> found;
        for (Int set = 0; set < num_sets; ++set)
            found[0].push_back(part[set] * whole[set]), found[1].push_back((1 - part[set]) * whole[set]);
        return found;
    }

    // What lies on the near side of a place, without the node of the cut.
    Partial near_of(Side &side, Int place, std::vector<Aligned> &made) {
        if (place == 0) return behind(side.x, side.ex);
        Place &at = side.places[place];
        if (Int(made.size()) <= place) made.resize(place + 1);
        if (!at.made) {
            Partial in;
            const double *time = times_at(side, at.before);
            if (at.before == 0)
                in = at.near == side.x ? behind(side.y, side.ey) : behind(side.x, side.ex);
            else
                in = near_of(side, at.before, made);
            made[place].resize(block_size());
            join(in, time, behind(at.aside, at.sibling), times(at.sibling), made[place].data);
            at.made = true;
        }
        return as_partial(made[place].data);
    }
    Partial far_of(Side &side, Int place) {
        return place == 0 ? behind(side.y, side.ey) : behind(side.places[place].far, side.places[place].edge);
    }

    // The likelihood with a subtree at the middle of each place.
    double score(Side &side, Int place, const Partial &subtree, const Times &time) {
        const auto [near, far] = divided(times_at(side, place), Times(num_sets, 0.5));
        scratch.resize(block_size());
        join(near_of(side, place, room->incoming[0]), near.data(), far_of(side, place), far.data(), scratch.data);
        expand(as_partial(scratch.data), subtree, more[0]);
        return value(more[0], time.data());
    }

    // Parsimony: the sets of states of Fitch (1971) for the subtree behind each end of each edge.

    const std::uint64_t *set_of(Int node, int k) const {
        return is_tip(node) ? tip_sets.data() + node * S * words : sets.data() + (3 * (node - n) + k) * S * words;
    }
    void meet(const std::uint64_t *one, const std::uint64_t *other, std::uint64_t *out) const {
        for (Int w = 0; w < words; ++w) {
            std::uint64_t shared = 0;
            for (int s = 0; s < S; ++s) shared |= one[s * words + w] & other[s * words + w];
            for (int s = 0; s < S; ++s) {
                const std::uint64_t a = one[s * words + w], b = other[s * words + w];
                out[s * words + w] = (a & b) | (~shared & (a | b));
            }
        }
    }
    double unmet(const std::uint64_t *one, const std::uint64_t *other) const {
        Int count = 0;
        for (Int w = 0; w < words; ++w) {
            std::uint64_t shared = 0;
            for (int s = 0; s < S; ++s) shared |= one[s * words + w] & other[s * words + w];
            count += __builtin_popcountll(~shared);
        }
        return double(count);
    }
    // Sets behind a node through an edge.
    const std::uint64_t *states_behind(Int node, Int edge) {
        const int k = slot(node, edge);
        if (!is_tip(node) && !known[3 * (node - n) + k]) {
            const int a = (k + 1) % 3, b = (k + 2) % 3;
            const auto *one = states_behind(neighbour[node][a], edge_at[node][a]);
            const auto *other = states_behind(neighbour[node][b], edge_at[node][b]);
            meet(one, other, sets.data() + (3 * (node - n) + k) * S * words);
            known[3 * (node - n) + k] = 1;
        }
        return set_of(node, k);
    }
    // Sets at the middle of each place of a side, (places, S, words); those behind the node of the cut are known.
    std::vector<std::uint64_t> sets_at_places(const Side &side) {
        const Int size = S * words, count = Int(side.places.size());
        std::vector<std::uint64_t> near(count * size), middle(count * size);
        const auto *x = states_behind(side.x, side.ex), *y = states_behind(side.y, side.ey);
        meet(x, y, middle.data());
        for (Int place = 1; place < count; ++place) {
            const Place &at = side.places[place];
            const auto *in = at.before ? near.data() + at.before * size : at.near == side.x ? y : x;
            meet(in, set_of(at.aside, slot(at.aside, at.sibling)), near.data() + place * size);
            meet(near.data() + place * size, set_of(at.far, slot(at.far, at.edge)), middle.data() + place * size);
        }
        return middle;
    }

    Int distance(const Side &side, Int one, Int other) const {
        Int steps = 0;
        const auto &places = side.places;
        while (one != other) {
            Int &lower = places[one].steps >= places[other].steps ? one : other;
            if (lower == 0) break;
            // Places that leave the same node are one step apart, not two.
            const Int &upper = &lower == &one ? other : one;
            if (places[upper].before == places[lower].before && places[upper].near == places[lower].near && upper)
                return steps + 1;
            lower = places[lower].before;
            ++steps;
        }
        return steps;
    }

    // Cut an edge and join the parts elsewhere: one side, or both.
    void regraft(Move move) {
        const Int cut = random.below(edges);
        Int u = ends[cut][0], v = ends[cut][1];
        if (is_tip(v) || (!is_tip(u) && random.uniform() < 0.5)) std::swap(u, v);
        const bool both = move == REJOIN;
        if (is_tip(v) || (both && is_tip(u))) return;
        Side side = side_of(v, cut), second;
        if (both) second = side_of(u, cut);
        const Int count = Int(side.places.size()), seconds = both ? Int(second.places.size()) : 1;
        if (count * seconds == 1) return;
        const Partial subtree = behind(u, cut);
        // Relative log weights of all pairs of places; the present one is the first.
        std::vector<double> logs(count * seconds);
        double ratio;
        Int chosen;
        if (move == NEAR_REGRAFT) {
            const auto weigh = [&](Int from) {
                for (Int place = 0; place < count; ++place)
                    logs[place] = place == from ? -HUGE_VAL : -NEAR * double(distance(side, from, place));
            };
            weigh(0);
            chosen = random.choose(logs);
            const double there = log_sum(logs);
            weigh(chosen);
            ratio = there - log_sum(logs);
        } else {
            if (move == LIKELIHOOD_REGRAFT) {
                // The same for the present and the proposed tree.
                Times typical;
                for (Int set = 0; set < num_sets; ++set)
                    typical.push_back((sum_of_lengths(set) - times(cut)[set]) / double(edges - 1));
                const auto middle = sets_at_places(side);
                const auto *own = states_behind(u, cut);
                for (Int place = 0; place < count; ++place) logs[place] = unmet(middle.data() + place * S * words, own);
                const double most = *std::min_element(logs.begin(), logs.end()) + SCREEN;
                if (logs[0] > most) return;
                for (double &one : logs)
                    one = one > most ? -HUGE_VAL : GUIDED * beta * score(side, &one - logs.data(), subtree, typical);
            } else {
                const auto middle = sets_at_places(side);
                if (both) {
                    const auto other = sets_at_places(second);
                    for (Int one = 0; one < count; ++one)
                        for (Int two = 0; two < seconds; ++two)
                            logs[one * seconds + two] = -WARP * beta * unmet(middle.data() + one * S * words,
                                                                      other.data() + two * S * words);
                } else {
                    const auto *own = states_behind(u, cut);
                    for (Int place = 0; place < count; ++place)
                        logs[place] = -WARP * beta * unmet(middle.data() + place * S * words, own);
                }
            }
            const double all = log_others(logs, 0);
            if (!(all > -HUGE_VAL)) return;
            std::vector<double> others(logs);
            others[0] = -HUGE_VAL;
            chosen = random.choose(others);
            ratio = logs[0] - log_others(logs, chosen) - (logs[chosen] - all);
        }
        if (!std::isfinite(ratio)) return;
        const Int one = chosen / seconds, two = chosen % seconds;
        Times at, other_at, old(times(cut), times(cut) + num_sets), proposed;
        for (Int set = 0; set < num_sets; ++set)
            at.push_back(random.uniform()), other_at.push_back(both ? random.uniform() : 0);
        const auto move_side = [&](Side &moved, Int place, const Times &part, std::vector<Aligned> &made, Aligned &out) {
            const double *time = times_at(moved, place);
            for (Int set = 0; set < num_sets; ++set) ratio += std::log(time[set]) - std::log(moved.time[set]);
            const auto [near, far] = divided(time, part);
            out.resize(block_size());
            join(near_of(moved, place, made), near.data(), far_of(moved, place), far.data(), out.data);
            return as_partial(out.data);
        };
        const Partial opened = move_side(side, one, at, room->incoming[0], first_side);
        const Partial opposite = both ? move_side(second, two, other_at, room->incoming[1], second_side) : subtree;
        expand(opened, opposite, more[0]);
        expand(behind(v, cut), subtree, coefficients);
        double proposals = 0;
        for (Int set = 0; set < num_sets; ++set) {
            // The split of the cut edge stays.
            const double shape = shape_of(cut, set), others = sum_of_lengths(set) - old[set];
            const double prior_rate = rate_given(rate_of(cut, set), others);
            const Fit there = fit(more[0], shape, prior_rate, set), here = fit(coefficients, shape, prior_rate, set);
            proposed.push_back(there.draw(random));
            if (!possible(proposed.back())) return;
            proposals += here.log_density(old[set]) - there.log_density(proposed.back());
        }
        ratio += proposals - log_prior_of_tree() +
                 beta * (value(more[0], proposed.data()) - value(coefficients, old.data()));
        kept = *this;
        std::copy(proposed.begin(), proposed.end(), times(cut));
        place_side(side, one, at);
        if (both) place_side(second, two, other_at);
        if (share > 0) refer();
        if (!decide(move, ratio + log_prior_of_tree())) {
            static_cast<Tree &>(*this) = kept;
            return;
        }
        forget_places(side, one);
        if (both) forget_places(second, two);
        forget(cut, true, true);
    }
    static constexpr double NEAR = 0.7, GUIDED = 0.7, WARP = 0.6, SCREEN = 4;

    // The edge that stays where the node is taken out, and the one that is free: pendant and locked edges stay.
    std::pair<Int, Int> names(const Side &side) const {
        const bool other = side.ey < n || locked[side.ey];
        return other ? std::pair{side.ey, side.ex} : std::pair{side.ex, side.ey};
    }

    // With the node of the cut at a part of a place's length.
    void place_side(const Side &side, Int place, const Times &part) {
        const Place at = side.places[place];
        const auto [near, far] = divided(times_at(side, place), part);
        const auto set_times = [&](Int edge, const Times &own) { std::copy(own.begin(), own.end(), times(edge)); };
        const auto set_neighbour = [&](Int node, Int edge, Int beside, Int by) {
            const int k = slot(node, edge);
            neighbour[node][k] = std::int32_t(beside), edge_at[node][k] = std::int32_t(by);
        };
        const auto narrow = [](Int a, Int b) { return std::array<std::int32_t, 2>{std::int32_t(a), std::int32_t(b)}; };
        if (place == 0) {
            set_times(side.ex, near), set_times(side.ey, far);
            return;
        }
        const auto [kept, freed] = names(side);
        set_neighbour(side.x, side.ex, side.y, kept);
        set_neighbour(side.y, side.ey, side.x, kept);
        ends[kept] = narrow(side.x, side.y);
        set_times(kept, side.time);
        set_neighbour(at.near, at.edge, side.node, freed);
        set_neighbour(at.far, at.edge, side.node, at.edge);
        ends[freed] = narrow(at.near, side.node), ends[at.edge] = narrow(side.node, at.far);
        set_times(freed, near), set_times(at.edge, far);
        const int k = slot(side.node, side.cut);
        neighbour[side.node][(k + 1) % 3] = std::int32_t(at.near), edge_at[side.node][(k + 1) % 3] = std::int32_t(freed);
        neighbour[side.node][(k + 2) % 3] = std::int32_t(at.far), edge_at[side.node][(k + 2) % 3] = std::int32_t(at.edge);
    }
    void forget_places(const Side &side, Int place) {
        const auto [stays, freed] = names(side);
        forget(stays, false, true), forget(freed, place > 0, true), forget(side.places[place].edge, false, true);
    }

    // All lengths of one set times a common factor.
    void scale() {
        const double size = std::exp(-5 * random.uniform()), step = size * random.normal(), factor = std::exp(step);
        const Int set = num_sets > 1 ? random.below(num_sets) : 0;
        const double before = beta * log_likelihood() + log_prior_of_tree();
        const std::vector<double> old(length);
        for (Int e = 0; e < edges; ++e) times(e)[set] *= factor;
        forget_all();
        const double after = beta * log_likelihood() + log_prior_of_tree();
        if (decide(SCALE, after - before + double(edges) * step)) return;
        length = old;
        forget_all();
    }

    // A tree of the reference.
    void renew() {
        if (share == 0) refer();
        const double before = beta * log_likelihood() + log_prior_of_tree() - log_reference_of_tree();
        kept = *this;
        const std::vector<char> known_before(known), valid_before(valid);
        room->blocks.swap(room->spare);
        draw_from(*reference);
        refer();
        const double after = beta * log_likelihood() + log_prior_of_tree() - log_reference_of_tree();
        if (decide(INDEPENDENT, after - before)) return;
        static_cast<Tree &>(*this) = kept;
        room->blocks.swap(room->spare), valid = valid_before, known = known_before;
    }
    double log_reference_of_tree() const {
        double sum = reference_log;
        for (std::size_t k = 0; k < length.size(); ++k)
            sum += log_prior(length[k], reference_shape[k], reference_rate[k]);
        return sum;
    }
    void draw_from(const Reference &source) {
        std::vector<std::uint64_t> all((n + 63) / 64, 0);
        for (Int taxon = 1; taxon < n; ++taxon) all[taxon / 64] |= std::uint64_t(1) << (taxon % 64);
        Int next_node = n, next_edge = n;
        draw_below(0, 0, all, source, next_node, next_edge);
        connect();
        forget_topology();
        if (!constraints.empty()) lock();
    }
    void draw_below(Int above, Int edge, const std::vector<std::uint64_t> &set, const Reference &source, Int &next_node,
                    Int &next_edge) {
        // The number of the only taxon, or -1.
        const auto tip = [](const std::vector<std::uint64_t> &one) {
            Int found = -1, sum = 0;
            for (std::size_t w = 0; w < one.size(); ++w) {
                sum += __builtin_popcountll(one[w]);
                if (one[w]) found = Int(64 * w) + __builtin_ctzll(one[w]);
            }
            return sum == 1 ? found : -1;
        };
        const LengthDensity *densities = source.of_lengths(set.data());
        for (Int k = 0; k < num_sets; ++k)
            times(edge)[k] = std::clamp(random.gamma(densities[k].shape) / densities[k].rate, 1e-30, 1e6);
        const Int own = tip(set), node = own < 0 ? next_node++ : own;
        ends[edge] = {std::int32_t(above), std::int32_t(node)};
        if (is_tip(node)) return;
        const std::vector<std::uint64_t> one = source.split(set.data(), random);
        std::vector<std::uint64_t> other(set);
        for (std::size_t w = 0; w < set.size(); ++w) other[w] &= ~one[w];
        for (const auto *part : {&one, const_cast<const std::vector<std::uint64_t> *>(&other)}) {
            const Int taxon = tip(*part);
            draw_below(node, taxon < 0 ? next_edge++ : taxon, *part, source, next_node, next_edge);
        }
    }

    double log_likelihood() {
        expand(behind(ends[focus][0], focus), behind(ends[focus][1], focus), coefficients);
        return value(coefficients, times(focus));
    }

    // The state and the model.

    void take_model(const Call &call) {
        beta = call.beta, pendant = call.pendant, inner = call.inner, rate = call.rate;
        reference = static_cast<const Reference *>(call.reference), share = call.share;
        power = (1 - share) * call.power;
        bool same = true;
        Int before = 0;
        for (Part &part : parts) {
            const Int k = &part - parts.data();
            same = take_process(part, call, k, before) && same;
            before += part.categories;
        }
        if (same) return;
        most_categories = most_terms = 0;
        for (const Part &part : parts) {
            most_categories = std::max(most_categories, part.categories);
            most_terms = std::max(most_terms, part.categories * part.distinct);
        }
        forget_all();
    }

    // Take the process of a part, whose categories come after some others; tell whether it is the same as before.
    bool take_process(Part &part, const Call &call, Int number, Int before) {
        const auto same = [](const std::vector<double> &one, const double *other, Int size) {
            return Int(one.size()) == size && std::equal(one.begin(), one.end(), other);
        };
        const Int categories = call.categories[number];
        const double *eigenvalues = call.eigenvalues + number * S, *frequencies = call.frequencies + number * S;
        const double *right = call.right + number * S * S, *left = call.left + number * S * S;
        const double *rates = call.rates + before, *rate_weights = call.rate_weights + before;
        if (same(part.eigenvalues, eigenvalues, S) && same(part.right, right, S * S) && same(part.left, left, S * S) &&
            same(part.frequencies, frequencies, S) && same(part.rates, rates, categories) &&
            same(part.rate_weights, rate_weights, categories) && part.invariant == call.invariant[number])
            return true;
        part.categories = categories, part.invariant = call.invariant[number];
        part.eigenvalues.assign(eigenvalues, eigenvalues + S);
        part.right.assign(right, right + S * S), part.left.assign(left, left + S * S);
        part.frequencies.assign(frequencies, frequencies + S);
        part.rates.assign(rates, rates + categories);
        part.rate_weights.assign(rate_weights, rate_weights + categories);
        std::vector<double> found;
        part.rank.assign(S, 0);
        for (int k = 0; k < S; ++k) {
            const auto near = [&](double one) { return std::abs(one - eigenvalues[k]) <= 1e-9; };
            const auto place = std::find_if(found.begin(), found.end(), near);
            part.rank[k] = int(place - found.begin());
            if (place == found.end()) found.push_back(eigenvalues[k]);
        }
        part.distinct = Int(found.size());
        part.exponents.resize(categories * part.distinct);
        for (Int c = 0; c < categories; ++c)
            for (Int d = 0; d < part.distinct; ++d) part.exponents[c * part.distinct + d] = found[d] * rates[c];
        part.at_left.resize(S * S), part.at_right.resize(S * S);
        for (int k = 0; k < S; ++k)
            for (int i = 0; i < S; ++i) {
                part.at_left[k * S + i] = Real(frequencies[i] * right[i * S + k]);
                part.at_right[k * S + i] = Real(left[k * S + i]);
            }
        for (Int s = part.first; s < part.last; ++s) {
            double sum = 0;
            for (int i = 0; i < S; ++i) sum += always[s * S + i] ? frequencies[i] : 0.0;
            constant.data[s] = Real(sum);
        }
        return false;
    }
    std::vector<char> always;  // states that all taxa allow, (width, S)

    void take_tree(const Call &call) {
        const std::vector<double> lengths_before(length);
        take_lengths(call);
        bool same = length == lengths_before;
        for (Int e = 0; e < edges && same; ++e) {
            const std::int32_t a = call.ends[2 * e], b = call.ends[2 * e + 1];
            same = (ends[e][0] == a && ends[e][1] == b) || (ends[e][0] == b && ends[e][1] == a);
        }
        // Always in the order of the edges, so that a state alone decides what follows.
        const std::vector<std::array<std::int32_t, 3>> before(edge_at);
        for (Int e = 0; e < edges; ++e) ends[e] = {call.ends[2 * e], call.ends[2 * e + 1]};
        connect();
        if (!same || before != edge_at) forget_topology();
        if (!constraints.empty()) lock();
        if (share > 0) refer();
    }

    void take_lengths(const Call &call) {
        for (Int e = 0; e < edges; ++e)
            for (Int set = 0; set < num_sets; ++set) times(e)[set] = call.lengths[set * edges + e];
    }

    // Mark the edges whose split has to stay.
    void lock() {
        const Int size = Int(constraints[0].size());
        std::vector<std::uint64_t> splits(edges * size, 0);
        collect(neighbour[0][0], 0, splits.data(), size);
        for (Int e = 0; e < edges; ++e) {
            const auto equal = [&](const auto &one) { return std::equal(one.begin(), one.end(), &splits[e * size]); };
            locked[e] = std::any_of(constraints.begin(), constraints.end(), equal);
        }
    }
    std::vector<std::vector<std::uint64_t>> constraints;

    // Whether a taxon may be added at an edge of a tree of some taxa, one of whose sides is given as bits.
    bool allowed(Int taxon, const std::uint64_t *side, const std::vector<std::uint64_t> &present) const {
        for (const auto &one : constraints) {
            const bool inside = (one[taxon / 64] >> (taxon % 64)) & 1;
            // The taxa on the same side of the constraint must stay together, if there are others.
            bool some = false, others = false, near = true, far = true;
            for (std::size_t w = 0; w < one.size(); ++w) {
                const std::uint64_t own = present[w] & (inside ? one[w] : ~one[w]);
                some = some || own, others = others || (present[w] & ~own);
                near = near && !(side[w] & ~own), far = far && !(present[w] & ~side[w] & ~own);
            }
            if (some && others && !near && !far) return false;
        }
        return true;
    }

    // List the neighbours of each node, in the order of the edges that have ends.
    void connect() {
        std::vector<int> used(nodes, 0);
        for (Int e = 0; e < edges; ++e)
            for (int side = 0; side < 2 && ends[e][0] >= 0; ++side) {
                const Int node = ends[e][side];
                neighbour[node][used[node]] = ends[e][1 - side];
                edge_at[node][used[node]++] = std::int32_t(e);
            }
    }

    static Int whole(Int count) { return (count + WIDTH - 1) / WIDTH * WIDTH; }
    static Int padded(const Data &data) {
        Int total = 0;
        for (Int k = 0; k < data.num_parts; ++k) total += whole(data.part_sizes[k]);
        return total;
    }

  public:
    explicit Chain(const Data &data)
        : n(data.taxa), edges(2 * n - 3), nodes(2 * n - 2), patterns(data.patterns),
          num_sets(data.num_sets), width(padded(data)), valid(3 * (n - 2), 0), tips(n),
          known(3 * (n - 2), 0), always(width * S, 1) {
        locked.assign(edges, 0);
        neighbour.resize(nodes), edge_at.resize(nodes), ends.resize(edges), length.assign(edges * num_sets, -1);
        reference_shape.assign(edges * num_sets, 0), reference_rate.assign(edges * num_sets, 0);
        const Int size = (n + 63) / 64;
        for (Int k = 0; k < data.num_constraints; ++k)
            constraints.emplace_back(data.constraints + k * size, data.constraints + (k + 1) * size);
        weights.resize(width), constant.resize(width);
        std::fill(weights.data, weights.data + width, Real(0));
        Int sites = 0;
        std::vector<Int> order;  // of the patterns; -1 fills up vectors
        for (Int k = 0, start = 0; k < data.num_parts; start += data.part_sizes[k++]) {
            const Int first = Int(order.size()), count = data.part_sizes[k];
            // Patterns of one site come first.
            order.resize(first + count);
            std::iota(order.begin() + first, order.end(), start);
            const bool is_data = data.conditioned[k] == 0;
            const auto one_site = [&](Int s) { return is_data && data.weights[s] == 1; };
            const auto middle = std::stable_partition(order.begin() + first, order.end(), one_site);
            Part part;
            part.first = first, part.last = first + whole(count);
            part.single = first + (middle - order.begin() - first) / WIDTH * WIDTH;
            part.conditioned = data.conditioned[k], part.set = data.part_sets[k];
            parts.push_back(part);
            order.resize(part.last, -1);
        }
        std::vector<Int> counts(width, 0);  // sites of each pattern, for parsimony
        for (const Part &part : parts)
            for (Int s = part.first; s < part.last; ++s)
                if (order[s] >= 0) {
                    weights.data[s] = Real(data.weights[order[s]]);
                    counts[s] = part.conditioned > 0 ? 0 : Int(std::ceil(data.weights[order[s]]));
                    sites += counts[s];
                }
        words = (sites + 63) / 64;
        tip_sets.assign(n * S * words, ~std::uint64_t(0));
        sets.assign(3 * (n - 2) * S * words, 0);
        for (Int taxon = 0; taxon < n; ++taxon) {
            tips[taxon].resize(S * width);
            Int site = 0;
            for (Int s = 0; s < width; ++s) {
                const bool real = order[s] >= 0;
                const std::uint64_t mask = real ? data.masks[taxon * patterns + order[s]] : ~std::uint64_t(0);
                const Int count = counts[s];
                for (int i = 0; i < S; ++i) {
                    const bool allowed = (mask >> i) & 1;
                    tips[taxon].data[i * width + s] = Real(allowed);
                    always[s * S + i] &= allowed;
                    if (!allowed)
                        for (Int k = site; k < site + count; ++k)
                            tip_sets[(taxon * S + i) * words + k / 64] &= ~(std::uint64_t(1) << (k % 64));
                }
                site += count;
            }
        }
    }

    void run(Call &call) {
        std::memcpy(random.s, call.random, sizeof random.s);
        enter(*static_cast<Room *>(call.room));
        take_model(call);
        take_tree(call);
        focus = *call.focus, counts = call.counts;
        double total = 0;
        for (int move = 0; move < MOVES; ++move) total += call.shares[move];
        for (Int step = 0; step < call.steps; ++step) {
            double left = random.uniform() * total;
            int move = 0;
            while (move + 1 < MOVES && (left -= call.shares[move]) >= 0) ++move;
            if (move == INDEPENDENT && reference) {
                renew();
            } else if (move <= EXCHANGE || move == INDEPENDENT) {
                walk();
                if (move != EXCHANGE || focus < n || locked[focus])
                    resample(focus);
                else
                    exchange(focus);
            } else if (move == SCALE) {
                scale();
            } else {
                regraft(Move(move));
            }
        }
        *call.log_likelihood = log_likelihood();
        *call.focus = focus;
        if (reference) {
            if (share == 0) refer();
            *call.log_reference = log_reference_of_tree();
        }
        give(call);
    }

    void enter(Room &given) {
        if (room == &given && given.tenant == this) return;
        given.blocks.resize(valid.size()), given.spare.resize(valid.size());
        forget_all();
        room = &given, given.tenant = this;
    }

    // A draw from the reference.
    void draw(Call &call) {
        std::memcpy(random.s, call.random, sizeof random.s);
        draw_from(*static_cast<const Reference *>(call.reference));
        give(call);
    }

    void give(Call &call) const {
        std::memcpy(call.random, random.s, sizeof random.s);
        for (Int e = 0; e < edges; ++e)
            for (Int set = 0; set < num_sets; ++set) call.lengths[set * edges + e] = times(e)[set];
        for (Int e = 0; e < edges; ++e) call.ends[2 * e] = ends[e][0], call.ends[2 * e + 1] = ends[e][1];
        const Int size = (n + 63) / 64;
        std::fill(call.splits, call.splits + edges * size, 0);
        collect(neighbour[0][0], 0, call.splits, size);
        // The pendant edge of the first taxon has all others on its other side.
    }

    // Write the taxa below each edge, seen from the first taxon.
    void collect(Int node, Int edge, std::uint64_t *splits, Int size) const {
        std::uint64_t *own = splits + edge * size;
        if (is_tip(node)) {
            own[node / 64] |= std::uint64_t(1) << (node % 64);
            return;
        }
        for (int k = 0; k < 3; ++k) {
            const Int below = edge_at[node][k];
            if (below == edge) continue;
            collect(neighbour[node][k], below, splits, size);
            for (Int w = 0; w < size; ++w) own[w] |= splits[below * size + w];
        }
    }

    // A tree by stepwise addition: each taxon, in random order, where it adds fewest changes; anywhere if beta is zero.
    void grow(Call &call) {
        std::memcpy(random.s, call.random, sizeof random.s);
        std::vector<std::int32_t> order(n);
        std::iota(order.begin(), order.end(), 0);
        for (Int i = n - 1; i > 0; --i) std::swap(order[i], order[random.below(i + 1)]);
        std::vector<Int> present;
        const auto link = [&](Int edge, Int a, Int b) {
            ends[edge] = {std::int32_t(a), std::int32_t(b)};
            present.push_back(edge);
        };
        // Inner edges are numbered as they come.
        Int next = n;
        std::fill(ends.begin(), ends.end(), std::array<std::int32_t, 2>{-1, -1});
        const Int size = (n + 63) / 64;
        std::vector<std::uint64_t> taken(size, 0);
        const auto add = [&](Int taxon) { taken[taxon / 64] |= std::uint64_t(1) << (taxon % 64); };
        for (int i = 0; i < 3; ++i) link(order[i], order[i], n), add(order[i]);
        for (Int i = 3; i < n; ++i) {
            connect();
            forget_topology();
            std::vector<std::uint64_t> middle(S * words), splits(edges * size, 0);
            if (!constraints.empty()) {
                const Int tip = order[0];
                collect(neighbour[tip][0], tip, splits.data(), size);
            }
            double best = HUGE_VAL;
            std::vector<Int> ties;
            for (Int e : present) {
                if (!allowed(order[i], &splits[e * size], taken)) continue;
                double cost = 0;
                if (call.beta > 0) {
                    meet(states_behind(ends[e][0], e), states_behind(ends[e][1], e), middle.data());
                    cost = unmet(middle.data(), set_of(order[i], 0));
                }
                if (cost < best) ties.clear();
                if (cost <= best) best = cost, ties.push_back(e);
            }
            const Int e = ties[random.below(Int(ties.size()))], node = n + i - 2, a = ends[e][0], b = ends[e][1];
            // A pendant edge keeps its number.
            const Int tip = a < n ? a : b, far = a < n ? b : a;
            const Int name = next++;
            ends[e] = {std::int32_t(tip), std::int32_t(node)};
            link(name, node, far);
            link(order[i], order[i], node);
            add(order[i]);
        }
        connect();
        take_lengths(call);
        forget_topology();
        give(call);
    }
};

// 0, or what has kept a call from its end: 1 too little memory, 2 no finite weight.
template <class Work> int status_of(const Work &work) {
    try {
        work();
    } catch (const NoChoice &) {
        return 2;
    } catch (...) {
        return 1;
    }
    return 0;
}

template <class Made, class From> void *made(const From *from) {
    try {
        return new Made(*from);
    } catch (...) {
        return nullptr;
    }
}

}  // namespace

extern "C" {
std::int64_t size_of_call() { return sizeof(Call); }
void *make_chain(const Data *data) { return made<Chain>(data); }
void delete_chain(void *chain) { delete static_cast<Chain *>(chain); }
int run_chain(void *chain, Call *call) {
    return status_of([&] { static_cast<Chain *>(chain)->run(*call); });
}
int draw_tree(void *chain, Call *call) {
    return status_of([&] { static_cast<Chain *>(chain)->draw(*call); });
}
void *make_room() { return new (std::nothrow) Room; }
void delete_room(void *room) { delete static_cast<Room *>(room); }
void *make_reference(const Sample *sample) { return made<Reference>(sample); }
void delete_reference(void *reference) { delete static_cast<Reference *>(reference); }
int grow_tree(void *chain, Call *call) {
    return status_of([&] { static_cast<Chain *>(chain)->grow(*call); });
}
}
