// The likelihood of an alignment on many topologies, and its gradient, in two passes.
//
// One topology is done after the other, a few vectors of branch lengths at a time, so that everything stays in the
// cache. A table has one line of four states for every row below every edge; each state has one lane for each vector.
// Partial likelihoods are scaled by powers of two, which is exact; the exponents are added up.
//
// forest_native.py says what the arguments are; types and order of the fields of Task must stay as they are there.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <vector>

namespace {

struct Task {
    std::int64_t patterns, taxa, topologies, samples;
    const std::int32_t *codes, *representatives;  // (slots, patterns)
    const double *weights;                        // (slots, patterns)
    const std::int64_t *counts;                   // (slots,)
    const std::uint8_t *masks;                    // (taxa, patterns)
    const std::uint8_t *reading;                  // (32, 4)
    const std::int32_t *order, *factors, *roots;  // (topologies, taxa - 3), (.., taxa - 3, 2), (topologies, 3)
    const std::int32_t *slots;                    // (topologies, edges)
    const void *inputs;                           // (samples, topologies, edges, INPUTS)
    const void *frequencies;                      // (samples, topologies, 4)
    void *values;                                 // (samples, topologies)
    void *slopes;                                 // like inputs, or null
    void *frequency_slopes;                       // like frequencies, or null
};

template <class Real> struct Format;
template <> struct Format<double> {
    using Word = std::int64_t;
    static constexpr int shift = 52, bias = 1023, lift = 200;
    static constexpr double tiny = 0x1p-1000, large = 0x1p200;
};
template <> struct Format<float> {
    using Word = std::int32_t;
    static constexpr int shift = 23, bias = 127, lift = 60;
    static constexpr float tiny = 0x1p-100f, large = 0x1p60f;
};

template <class Number, int SIZE> struct Vector {
    typedef Number Type __attribute__((vector_size(SIZE * sizeof(Number))));
};

template <class To, class From> inline To bits_of(const From &from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

// Another type of number, lane by lane.
template <class To, class From> inline To convert(From from) {
    if constexpr (std::is_arithmetic_v<From>)
        return To(from);
    else
        return __builtin_convertvector(from, To);
}

// Weighted sums, one for each lane.
template <int WIDTH> struct Sums {
    double lane[WIDTH] = {};

    template <class Number, class Lane> void add(const Lane &values, double weight) {
        Number numbers[WIDTH];
        static_assert(sizeof numbers == sizeof values);
        std::memcpy(numbers, &values, sizeof values);
        for (int v = 0; v < WIDTH; ++v) lane[v] += weight * double(numbers[v]);
    }
};

template <class Type> inline Type load(const void *place) {
    Type value;
    std::memcpy(&value, place, sizeof value);
    return value;
}

// In which order the four states of a line are read.
struct Reading {
    const std::uint8_t *state;
};

// A line of several lanes: each state is a vector of its own.
template <class Real_, int WIDTH_> struct Lanes {
    using Real = Real_;
    static constexpr int WIDTH = WIDTH_, SIZE = 4 * WIDTH;
    using Lane = typename Vector<Real, WIDTH>::Type;
    using Words = typename Vector<typename Format<Real>::Word, WIDTH>::Type;
    Lane state[4];

    static Lanes read(const Real *line, Reading reading) {
        Lanes result;
        for (int i = 0; i < 4; ++i) result.state[i] = load<Lane>(line + reading.state[i] * WIDTH);
        return result;
    }
    void add_to(Real *line, Reading reading) const {
        for (int i = 0; i < 4; ++i) {
            Real *place = line + reading.state[i] * WIDTH;
            const Lane sum = load<Lane>(place) + state[i];
            std::memcpy(place, &sum, sizeof sum);
        }
    }
    template <class Body> static Lanes make(Body body) { return {{body(0), body(1), body(2), body(3)}}; }
    static Lanes all(Lane value) { return {{value, value, value, value}}; }
    Lane operator[](int i) const { return state[i]; }
    Lane sum() const { return (state[0] + state[1]) + (state[2] + state[3]); }
    Lane largest() const {
        const Lane one = state[0] > state[1] ? state[0] : state[1], other = state[2] > state[3] ? state[2] : state[3];
        return one > other ? one : other;
    }
    Lanes operator*(const Lanes &other) const { return make([&](int i) { return state[i] * other.state[i]; }); }
    Lanes operator+(const Lanes &other) const { return make([&](int i) { return state[i] + other.state[i]; }); }
    Lanes operator-(const Lanes &other) const { return make([&](int i) { return state[i] - other.state[i]; }); }
    static Real at(const Lane &lane, int v) { return lane[v]; }
};

// A line of a single lane: the four states are one vector.
template <class Real_> struct Lanes<Real_, 1> {
    using Real = Real_;
    static constexpr int WIDTH = 1, SIZE = 4;
    using Lane = Real;
    using Words = typename Format<Real>::Word;
    using States = typename Vector<Real, 4>::Type;
    using Places = typename Vector<Words, 4>::Type;
    States states;

    static States shuffle(States from, Reading reading) {
#if defined(__GNUC__) && !defined(__clang__)
        const Places places = {reading.state[0], reading.state[1], reading.state[2], reading.state[3]};
        return __builtin_shuffle(from, places);
#else
        return States{from[reading.state[0]], from[reading.state[1]], from[reading.state[2]], from[reading.state[3]]};
#endif
    }
    static Lanes read(const Real *line, Reading reading) { return {shuffle(load<States>(line), reading)}; }
    void add_to(Real *line, Reading reading) const {
        for (int i = 0; i < 4; ++i) line[reading.state[i]] += states[i];
    }
    static Lanes all(Real value) { return {States{value, value, value, value}}; }
    template <class Body> static Lanes make(Body body) { return {States{body(0), body(1), body(2), body(3)}}; }
    Real operator[](int i) const { return states[i]; }
    Real sum() const { return (states[0] + states[1]) + (states[2] + states[3]); }
    Real largest() const {
        const Real one = states[0] > states[1] ? states[0] : states[1], other = states[2] > states[3] ? states[2] : states[3];
        return one > other ? one : other;
    }
    Lanes operator*(const Lanes &other) const { return {states * other.states}; }
    Lanes operator+(const Lanes &other) const { return {states + other.states}; }
    Lanes operator-(const Lanes &other) const { return {states - other.states}; }
    static Real at(Real lane, int) { return lane; }
};

// Exponents of numbers >= 0; zero for those that have none of the usual ones.
template <class Form, class Words, class Lane> inline Words exponent_of(Lane value) {
    const Words exponent = bits_of<Words>(value) >> Form::shift;
    return ((exponent > 0) & (exponent < 2 * Form::bias)) ? exponent - Form::bias : exponent - exponent;
}

template <class Form, class Lane, class Words> inline Lane two_to(Words power) {
    return bits_of<Lane>(Words((power + Form::bias) << Form::shift));
}

constexpr double LOG_2 = 0.6931471805599453;

// Natural logarithms, by the series of the inverse hyperbolic tangent; those of a library would take half of the time.
template <class Line> inline typename Line::Lane logarithm(typename Line::Lane value) {
    using Real = typename Line::Real;
    using Lane = typename Line::Lane;
    using Form = Format<Real>;
    const Lane zero{}, lifted = value < Form::tiny ? value * Form::large : value;
    const auto exponent = exponent_of<Form, typename Line::Words>(lifted);
    const Lane one = lifted * two_to<Form, Lane>(-exponent), above = one > Real(1.4142135623730951) ? zero + 1 : zero;
    const Lane reduced = one - Real(0.5) * above * one, s = (reduced - 1) / (reduced + 1), square = s * s;
    Lane series = zero + Real(1) / 23;
    for (int odd = 21; odd > 0; odd -= 2) series = series * square + Real(1) / odd;
    const Lane power = convert<Lane>(exponent) + above - (value < Form::tiny ? zero + Form::lift : zero);
    return value == zero ? zero - Real(HUGE_VAL) : 2 * s * series + Real(LOG_2) * power;
}

// All changes equally likely: the input is the length t, and the matrix a I + (1 - a) J / 4 with a = exp(-4 t / 3).
template <class Line> struct Uniform {
    using Real = typename Line::Real;
    using Lane = typename Line::Lane;
    static constexpr int INPUTS = 1, COEFFICIENTS = 2;

    static void prepare(const Real *input, Real *c, int v) {
        const Real events = input[0] * Real(4) / Real(3);
        c[v] = std::exp(-events);
        c[Line::WIDTH + v] = -std::expm1(-events) * Real(0.25);
    }
    static Line send(const Real *c, const Line &p) {
        return p * Line::all(load<Lane>(c)) + Line::all(p.sum() * load<Lane>(c + Line::WIDTH));
    }
    static Line pull(const Real *c, const Line &g) { return send(c, g); }
    static void gather(const Line &g, const Line &m, const Line &, Lane *sums) {
        *sums += (g * (Line::all(m.sum() * Real(0.25)) - m)).sum();
    }
    static Real slope(Real sum) { return sum * Real(4) / Real(3); }
};

// Any matrix, which is the input.
template <class Line> struct Matrices {
    using Real = typename Line::Real;
    using Lane = typename Line::Lane;
    static constexpr int INPUTS = 16, COEFFICIENTS = 16;

    static void prepare(const Real *input, Real *c, int v) {
        for (int k = 0; k < 16; ++k) c[k * Line::WIDTH + v] = input[k];
    }
    static Lane entry(const Real *c, int i, int j) { return load<Lane>(c + (4 * i + j) * Line::WIDTH); }
    static Line send(const Real *c, const Line &p) {
        return Line::make([&](int i) {
            return (entry(c, i, 0) * p[0] + entry(c, i, 1) * p[1]) + (entry(c, i, 2) * p[2] + entry(c, i, 3) * p[3]);
        });
    }
    static Line pull(const Real *c, const Line &g) {
        return Line::make([&](int j) {
            return (entry(c, 0, j) * g[0] + entry(c, 1, j) * g[1]) + (entry(c, 2, j) * g[2] + entry(c, 3, j) * g[3]);
        });
    }
    static void gather(const Line &g, const Line &, const Line &p, Lane *sums) {
        for (int i = 0; i < 4; ++i)
            for (int j = 0; j < 4; ++j) sums[4 * i + j] += g[i] * p[j];
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
    std::vector<std::int64_t> start;                     // first row of each edge
    const std::int32_t *order, *factors, *roots, *slots;  // of one topology

    // One factor of a row: where its line starts, and how it is read.
    struct Factor {
        std::int64_t line;
        Reading reading;
    };
    Factor factor(std::int32_t edge, std::int32_t pattern) const {
        const std::int32_t code = task.codes[slots[edge] * task.patterns + pattern];
        return {(start[edge] + (code >> 5)) * Line::SIZE, {task.reading + 4 * (code & 31)}};
    }
    Line message(const Factor &factor) const { return Line::read(messages.data() + factor.line, factor.reading); }
    void hand_down(const Factor &factor, const Line &adjoint) {
        adjoint.add_to(adjoints.data() + factor.line, factor.reading);
    }
    const std::int32_t *shown_by(std::int64_t slot) const { return task.representatives + slot * task.patterns; }
    const Real *coefficient(std::int32_t edge) const { return coefficients.data() + edge * COEFFICIENTS * WIDTH; }
    Line tip(std::int32_t edge, std::int32_t pattern) const {
        const int mask = task.masks[edge * task.patterns + pattern];
        return Line::make([&](int i) { return Lane{} + Real((mask >> i) & 1); });
    }

    // The partial likelihoods below all edges; returns their exponents.
    Sums<WIDTH> upward() {
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
                const Line partial = message(factor(one, shown[row])) * message(factor(other, shown[row]));
                const auto power = exponent_of<Format<Real>, typename Line::Words>(partial.largest());
                const Lane inverse = two_to<Format<Real>, Lane>(-power);
                exponents.template add<typename Format<Real>::Word>(power, weight[row]);
                std::memcpy(scaler, &inverse, sizeof inverse);
                const Line sent = Transport::send(coefficient(edge), partial * Line::all(inverse));
                std::memcpy(line, &sent, sizeof sent);
            }
        }
        return exponents;
    }

    // The root's rows: returns their logarithms, and hands adjoints to the three edges there.
    template <bool slopes> Sums<WIDTH> root(const Line &frequencies, Line &by_frequency) {
        Sums<WIDTH> logs;
        const std::int32_t *shown = shown_by(task.taxa);
        const double *weight = task.weights + task.taxa * task.patterns;
        const Lane zero{};
        for (std::int64_t row = 0; row < task.counts[task.taxa]; ++row) {
            const Factor a = factor(roots[0], shown[row]), b = factor(roots[1], shown[row]), c = factor(roots[2], shown[row]);
            const Line one = message(a), other = message(b), third = message(c), pair = one * other;
            const Lane site = (pair * third * frequencies).sum();
            logs.template add<Real>(logarithm<Line>(site), weight[row]);
            if (!slopes) continue;
            const Line share = Line::all(site > zero ? Real(weight[row]) / site : zero);
            by_frequency = by_frequency + share * pair * third;
            const Line part = share * frequencies;
            hand_down(a, part * other * third);
            hand_down(b, part * one * third);
            hand_down(c, part * pair);
        }
        return logs;
    }

    void downward(Lane *sums) {
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
                const Line pulled = Transport::pull(coefficient(edge), own) * inverse;
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
            for (int i = 0; i < 4; ++i)
                frequencies[i * WIDTH + v] = static_cast<const Real *>(task.frequencies)[4 * place + i];
        }
        Line by_frequency = Line::all(Lane{});
        const Sums<WIDTH> exponents = upward();
        Sums<WIDTH> logs;
        std::vector<Lane> sums;
        if (task.slopes) {
            adjoints.assign(rows * Line::SIZE, 0);
            sums.assign(edges * COEFFICIENTS, Lane{});
            logs = root<true>(load<Line>(frequencies), by_frequency);
            downward(sums.data());
        } else {
            logs = root<false>(load<Line>(frequencies), by_frequency);
        }
        for (int v = 0; v < count; ++v) {
            const std::int64_t place = (first + v) * task.topologies + topology;
            static_cast<Real *>(task.values)[place] = Real(logs.lane[v] + LOG_2 * exponents.lane[v]);
            if (!task.slopes) continue;
            Real *slope = static_cast<Real *>(task.slopes) + place * edges * INPUTS;
            for (std::int64_t edge = 0; edge < edges; ++edge)
                for (int k = 0; k < INPUTS; ++k)
                    slope[edge * INPUTS + k] = Transport::slope(Line::at(sums[edge * COEFFICIENTS + k], v));
            for (int i = 0; i < 4; ++i)
                static_cast<Real *>(task.frequency_slopes)[4 * place + i] = Line::at(by_frequency[i], v);
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
void uniform_double(const Task *task) { run<double, Uniform>(*task); }
void uniform_float(const Task *task) { run<float, Uniform>(*task); }
void matrices_double(const Task *task) { run<double, Matrices>(*task); }
void matrices_float(const Task *task) { run<float, Matrices>(*task); }
}
