// The likelihood of an alignment on many topologies, and its gradient, in two passes.
//
// One topology is done after the other, a few vectors of branch lengths at a time, so that everything stays in the
// cache. A table has one line of STATES states for every row below every edge; each state has one lane for each vector.
// Partial likelihoods are scaled by powers of two, which is exact; the exponents are added up.
//
// The rows of the root are added up, or given one by one, so that sites can be mixtures; their gradient then takes a
// weight for each of them.
//
// native.py says what the arguments are; types and order of the fields of Task must stay as they are there. It compares
// the size of both.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "lanes.h"

namespace {

// A set of states as bits.
using Mask = std::conditional_t<(STATES > 8), std::uint64_t, std::uint8_t>;

struct Task {
    std::int64_t patterns, taxa, topologies, samples;
    const std::int32_t *codes, *representatives;  // (slots, patterns)
    const double *weights;                        // (slots, patterns)
    const std::int64_t *counts;                   // (slots,)
    const Mask *masks;                            // (taxa, patterns)
    const std::uint8_t *reading;                  // (32, STATES)
    const std::int32_t *order, *factors, *roots;  // (topologies, taxa - 3), (.., taxa - 3, 2), (topologies, 3)
    const std::int32_t *slots;                    // (topologies, edges)
    const void *inputs;                           // (samples, topologies, edges, INPUTS)
    const void *frequencies;                      // (samples, topologies, STATES)
    const void *row_weights;                      // (samples, topologies, rows), or null
    void *values;                                 // (samples, topologies), or null
    void *row_values;                             // (samples, topologies, rows), or null
    void *slopes;                                 // like inputs, or null
    void *frequency_slopes;                       // like frequencies, or null
};

// All changes equally likely: the input is the length t, and the matrix a I + (1 - a) J / n with n states and
// a = exp(-n t / (n - 1)).
template <class Line> struct Uniform {
    using Real = typename Line::Real;
    using Lane = typename Line::Lane;
    static constexpr int INPUTS = 1, COEFFICIENTS = 2;

    static void prepare(const Real *input, Real *c, int v) {
        const Real events = input[0] * Real(STATES) / Real(STATES - 1);
        c[v] = std::exp(-events);
        c[Line::WIDTH + v] = -std::expm1(-events) * (Real(1) / Real(STATES));
    }
    static Line send(const Real *c, const Line &p) {
        return p * Line::all(load<Lane>(c)) + Line::all(p.sum() * load<Lane>(c + Line::WIDTH));
    }
    static Line pull(const Real *c, const Line &g) { return send(c, g); }
    static void gather(const Line &g, const Line &m, const Line &, Lane *sums) {
        *sums += (g * (Line::all(m.sum() * (Real(1) / Real(STATES))) - m)).sum();
    }
    static Real slope(Real sum) { return sum * Real(STATES) / Real(STATES - 1); }
};

// Any matrix, which is the input.
template <class Line> struct Matrices {
    using Real = typename Line::Real;
    using Lane = typename Line::Lane;
    static constexpr int INPUTS = STATES * STATES, COEFFICIENTS = INPUTS;

    static void prepare(const Real *input, Real *c, int v) {
        for (int k = 0; k < INPUTS; ++k) c[k * Line::WIDTH + v] = input[k];
    }
    static Lane entry(const Real *c, int i, int j) { return load<Lane>(c + (STATES * i + j) * Line::WIDTH); }
    static Line send(const Real *c, const Line &p) {
        return Line::make([&](int i) { return pairwise<0, STATES>([&](int j) { return entry(c, i, j) * p[j]; }); });
    }
    static Line pull(const Real *c, const Line &g) {
        return Line::make([&](int j) { return pairwise<0, STATES>([&](int i) { return entry(c, i, j) * g[i]; }); });
    }
    static void gather(const Line &g, const Line &, const Line &p, Lane *sums) {
        for (int i = 0; i < STATES; ++i)
            for (int j = 0; j < STATES; ++j) sums[STATES * i + j] += g[i] * p[j];
    }
    static Real slope(Real sum) { return sum; }
};

template <class Line, template <class> class Kind> class Pass {
    using Real = typename Line::Real;
    using Lane = typename Line::Lane;
    using Transport = Kind<Line>;
    static constexpr int INPUTS = Transport::INPUTS, COEFFICIENTS = Transport::COEFFICIENTS, WIDTH = Line::WIDTH;

    const Task &task;
    const std::int64_t edges;
    std::vector<Real> coefficients, messages, adjoints, inverses;
    std::vector<Real> totals;                            // exponents of everything below each row
    std::vector<std::int64_t> start;                     // first row of each edge
    const std::int32_t *order, *factors, *roots, *slots;  // of one topology

    // One factor of a row: where its line starts, and how it is read.
    struct Factor {
        std::int64_t line;
        Reading reading;
    };
    Factor factor(std::int32_t edge, std::int32_t pattern) const {
        const std::int32_t code = task.codes[slots[edge] * task.patterns + pattern];
        return {(start[edge] + (code >> 5)) * Line::SIZE, {task.reading + STATES * (code & 31)}};
    }
    Line message(const Factor &factor) const { return Line::read(messages.data() + factor.line, factor.reading); }
    void hand_down(const Factor &factor, const Line &adjoint) {
        adjoint.add_to(adjoints.data() + factor.line, factor.reading);
    }
    const std::int32_t *shown_by(std::int64_t slot) const { return task.representatives + slot * task.patterns; }
    const Real *coefficient(std::int32_t edge) const { return coefficients.data() + edge * COEFFICIENTS * WIDTH; }
    Line tip(std::int32_t edge, std::int32_t pattern) const {
        const Mask mask = task.masks[edge * task.patterns + pattern];
        return Line::make([&](int i) { return Lane{} + Real((mask >> i) & 1); });
    }

    Lane total(const Factor &factor) const { return load<Lane>(totals.data() + factor.line / Line::SIZE * WIDTH); }
    std::int64_t root_rows() const { return task.counts[task.taxa]; }

    // Adjoints of sites of hardly any likelihood stay finite, even if all rows add up; no message is above two.
    Real largest_adjoint() const { return std::numeric_limits<Real>::max() / Real(64 * root_rows()); }

    // Where a vector's numbers for the rows of the root start.
    std::int64_t of_root(std::int64_t topology, std::int64_t vector) const {
        return (vector * task.topologies + topology) * root_rows();
    }

    // The partial likelihoods below all edges; returns their exponents, or keeps those of each row.
    template <bool by_row> Sums<WIDTH> upward() {
        Sums<WIDTH> exponents;
        for (std::int32_t edge = 0; edge < task.taxa; ++edge) {
            const std::int32_t *shown = shown_by(slots[edge]);
            Real *line = messages.data() + start[edge] * Line::SIZE;
            for (std::int64_t row = 0; row < task.counts[slots[edge]]; ++row, line += Line::SIZE) {
                const Line sent = Transport::send(coefficient(edge), tip(edge, shown[row]));
                std::memcpy(line, &sent, sizeof sent);
            }
        }
        for (std::int64_t position = 0; position < task.taxa - 3; ++position) {
            const std::int32_t edge = order[position], one = factors[2 * position], other = factors[2 * position + 1];
            const std::int32_t *shown = shown_by(slots[edge]);
            const double *weight = task.weights + slots[edge] * task.patterns;
            Real *line = messages.data() + start[edge] * Line::SIZE;
            Real *scaler = inverses.data() + start[edge] * WIDTH;
            for (std::int64_t row = 0; row < task.counts[slots[edge]]; ++row, line += Line::SIZE, scaler += WIDTH) {
                const Factor a = factor(one, shown[row]), b = factor(other, shown[row]);
                const Line partial = message(a) * message(b);
                const auto power = exponent_of<Format<Real>, typename Line::Words>(partial.largest());
                const Lane inverse = two_to<Format<Real>, Lane>(-power);
                if constexpr (by_row) {
                    const Lane sum = convert<Lane>(power) + total(a) + total(b);
                    std::memcpy(totals.data() + (start[edge] + row) * WIDTH, &sum, sizeof sum);
                } else {
                    exponents.template add<typename Format<Real>::Word>(power, weight[row]);
                }
                std::memcpy(scaler, &inverse, sizeof inverse);
                const Line sent = Transport::send(coefficient(edge), partial * Line::all(inverse));
                std::memcpy(line, &sent, sizeof sent);
            }
        }
        return exponents;
    }

    // The root's rows: returns the sum of their logarithms, or writes each of them; and hands adjoints to the three
    // edges there, weighed by the rows' sites or by weights of their own.
    template <bool slopes, bool by_row>
    Sums<WIDTH> root(const Line &frequencies, Line &by_frequency, std::int64_t topology, std::int64_t first, int count) {
        Sums<WIDTH> logs;
        const std::int32_t *shown = shown_by(task.taxa);
        const double *weight = task.weights + task.taxa * task.patterns;
        const Lane zero{};
        const Lane limit = zero + largest_adjoint();
        for (std::int64_t row = 0; row < root_rows(); ++row) {
            const Factor a = factor(roots[0], shown[row]), b = factor(roots[1], shown[row]), c = factor(roots[2], shown[row]);
            const Line one = message(a), other = message(b), third = message(c), pair = one * other;
            const Lane site = (pair * third * frequencies).sum();
            if constexpr (!by_row) logs.template add<Real>(logarithm<Line>(site), weight[row]);
            if constexpr (by_row && !slopes) {
                const Lane value = logarithm<Line>(site) + Real(LOG_2) * (total(a) + total(b) + total(c));
                for (int v = 0; v < count; ++v)
                    static_cast<Real *>(task.row_values)[of_root(topology, first + v) + row] = Line::at(value, v);
            }
            if constexpr (!slopes) continue;
            Lane sites = zero + Real(weight[row]);
            if constexpr (by_row) {
                Real own[WIDTH] = {};
                for (int v = 0; v < count; ++v)
                    own[v] = static_cast<const Real *>(task.row_weights)[of_root(topology, first + v) + row];
                sites = load<Lane>(own);
            }
            const Lane ratio = sites / site, bounded = ratio > limit ? limit : ratio;
            const Line share = Line::all(site > zero ? bounded : zero);
            by_frequency = by_frequency + share * pair * third;
            const Line part = share * frequencies;
            hand_down(a, part * other * third);
            hand_down(b, part * one * third);
            hand_down(c, part * pair);
        }
        return logs;
    }

    void downward(Lane *sums) {
        const Lane limit = Lane{} + largest_adjoint();
        for (std::int64_t position = task.taxa - 4; position >= 0; --position) {
            const std::int32_t edge = order[position], one = factors[2 * position], other = factors[2 * position + 1];
            const std::int32_t *shown = shown_by(slots[edge]);
            const Real *line = messages.data() + start[edge] * Line::SIZE, *scaler = inverses.data() + start[edge] * WIDTH;
            const Real *adjoint = adjoints.data() + start[edge] * Line::SIZE;
            for (std::int64_t row = 0; row < task.counts[slots[edge]]; ++row) {
                const Factor a = factor(one, shown[row]), b = factor(other, shown[row]);
                const Line left = message(a), right = message(b), inverse = Line::all(load<Lane>(scaler + row * WIDTH));
                const Line own = load<Line>(adjoint + row * Line::SIZE);
                Transport::gather(own, load<Line>(line + row * Line::SIZE), left * right * inverse,
                                  sums + edge * COEFFICIENTS);
                const Line pulled = (Transport::pull(coefficient(edge), own) * inverse).at_most(limit);
                hand_down(a, pulled * right);
                hand_down(b, pulled * left);
            }
        }
        for (std::int32_t edge = 0; edge < task.taxa; ++edge) {
            const std::int32_t *shown = shown_by(slots[edge]);
            for (std::int64_t row = 0; row < task.counts[slots[edge]]; ++row) {
                const std::int64_t line = (start[edge] + row) * Line::SIZE;
                Transport::gather(load<Line>(adjoints.data() + line), load<Line>(messages.data() + line),
                                  tip(edge, shown[row]), sums + edge * COEFFICIENTS);
            }
        }
    }

  public:
    explicit Pass(const Task &task)
        : task(task), edges(2 * task.taxa - 3), coefficients(edges * COEFFICIENTS * WIDTH), start(edges) {}

    // `count` of the vectors from `first` on, no more than WIDTH.
    void run(std::int64_t topology, std::int64_t first, int count) {
        order = task.order + topology * (task.taxa - 3);
        factors = task.factors + topology * (task.taxa - 3) * 2;
        roots = task.roots + topology * 3;
        slots = task.slots + topology * edges;
        std::int64_t rows = 0;
        for (std::int64_t edge = 0; edge < edges; ++edge) {
            start[edge] = rows;
            rows += task.counts[slots[edge]];
        }
        messages.resize(rows * Line::SIZE);
        inverses.resize(rows * WIDTH);
        Real frequencies[Line::SIZE];
        for (int v = 0; v < WIDTH; ++v) {
            const std::int64_t place = (first + (v < count ? v : 0)) * task.topologies + topology;
            const Real *input = static_cast<const Real *>(task.inputs) + place * edges * INPUTS;
            for (std::int64_t edge = 0; edge < edges; ++edge)
                Transport::prepare(input + edge * INPUTS, coefficients.data() + edge * COEFFICIENTS * WIDTH, v);
            for (int i = 0; i < STATES; ++i)
                frequencies[i * WIDTH + v] = static_cast<const Real *>(task.frequencies)[STATES * place + i];
        }
        const Line at_root = load<Line>(frequencies);
        Line by_frequency = Line::all(Lane{});
        if (task.row_values) {
            totals.assign(rows * WIDTH, 0);
            upward<true>();
            root<false, true>(at_root, by_frequency, topology, first, count);
            return;
        }
        const Sums<WIDTH> exponents = upward<false>();
        Sums<WIDTH> logs;
        std::vector<Lane> sums;
        if (task.slopes) {
            adjoints.assign(rows * Line::SIZE, 0);
            sums.assign(edges * COEFFICIENTS, Lane{});
            logs = task.row_weights ? root<true, true>(at_root, by_frequency, topology, first, count)
                                    : root<true, false>(at_root, by_frequency, topology, first, count);
            downward(sums.data());
        } else {
            logs = root<false, false>(at_root, by_frequency, topology, first, count);
        }
        for (int v = 0; v < count; ++v) {
            const std::int64_t place = (first + v) * task.topologies + topology;
            if (task.values) static_cast<Real *>(task.values)[place] = Real(logs.lane[v] + LOG_2 * exponents.lane[v]);
            if (!task.slopes) continue;
            Real *slope = static_cast<Real *>(task.slopes) + place * edges * INPUTS;
            for (std::int64_t edge = 0; edge < edges; ++edge)
                for (int k = 0; k < INPUTS; ++k)
                    slope[edge * INPUTS + k] = Transport::slope(Line::at(sums[edge * COEFFICIENTS + k], v));
            for (int i = 0; i < STATES; ++i)
                static_cast<Real *>(task.frequency_slopes)[STATES * place + i] = Line::at(by_frequency[i], v);
        }
    }
};

template <class Real, template <class> class Kind> void run(const Task &task) {
    constexpr int WIDTH = 64 / sizeof(Real);
    Pass<Lanes<Real, 1>, Kind> single(task);
    Pass<Lanes<Real, WIDTH>, Kind> wide(task);
    for (std::int64_t topology = 0; topology < task.topologies; ++topology) {
        std::int64_t first = 0;
        while (first < task.samples) {
            const std::int64_t left = task.samples - first;
            const int count = int(left < WIDTH ? left : WIDTH);
            if (count > 2) {
                wide.run(topology, first, count);
                first += count;
            } else {
                single.run(topology, first++, 1);
            }
        }
    }
}

}  // namespace

extern "C" {
std::int64_t size_of_task() { return sizeof(Task); }
// 0, or 1 where memory is not enough. Each combination takes the compiler more than a second.
int prune(const Task *task) {
    try {
        run<REAL, KIND>(*task);
    } catch (...) {
        return 1;
    }
    return 0;
}
}
