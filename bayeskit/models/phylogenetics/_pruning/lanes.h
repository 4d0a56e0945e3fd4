// Lines of a table: STATES states, each with one lane for every vector of branch lengths.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace {

template <class Real> struct Format;
template <> struct Format<double> {
    using Word = std::int64_t;
    static constexpr int shift = 52, bias = 1023, lift = 200, terms = 12;
    static constexpr double tiny = 0x1p-1000, large = 0x1p200;
};
template <> struct Format<float> {
    using Word = std::int32_t;
    static constexpr int shift = 23, bias = 127, lift = 60, terms = 6;
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

// The sum of `term(i)` for i from FIRST to LAST - 1, by halves.
template <int FIRST, int LAST, class Term> inline auto pairwise(Term term) {
    if constexpr (LAST - FIRST == 1)
        return term(FIRST);
    else
        return pairwise<FIRST, (FIRST + LAST) / 2>(term) + pairwise<(FIRST + LAST) / 2, LAST>(term);
}

// A lane: a number for each of several vectors of branch lengths, or one.
template <class Number, int WIDTH> struct LaneOf {
    using Type = typename Vector<Number, WIDTH>::Type;
};
template <class Number> struct LaneOf<Number, 1> {
    using Type = Number;
};

// In which order the states of a line are read; more than four are read as they stand.
struct Reading {
    const std::uint8_t *state;
};

// A line whose states are lanes of their own.
template <class Real_, int WIDTH_> struct Lanes {
    using Real = Real_;
    static constexpr int WIDTH = WIDTH_, SIZE = STATES * WIDTH;
    using Lane = typename LaneOf<Real, WIDTH>::Type;
    using Words = typename LaneOf<typename Format<Real>::Word, WIDTH>::Type;
    Lane state[STATES];

    static int place_of(int i, Reading reading) { return (STATES == 4 ? reading.state[i] : i) * WIDTH; }
    static Lanes read(const Real *line, Reading reading) {
        return make([&](int i) { return load<Lane>(line + place_of(i, reading)); });
    }
    void add_to(Real *line, Reading reading) const {
        for (int i = 0; i < STATES; ++i) {
            Real *place = line + place_of(i, reading);
            const Lane sum = load<Lane>(place) + state[i];
            std::memcpy(place, &sum, sizeof sum);
        }
    }
    template <class Body> static Lanes make(Body body) {
        Lanes result;
        for (int i = 0; i < STATES; ++i) result.state[i] = body(i);
        return result;
    }
    static Lanes all(Lane value) {
        return make([&](int) { return value; });
    }
    Lane operator[](int i) const { return state[i]; }
    Lane sum() const {
        return pairwise<0, STATES>([&](int i) { return state[i]; });
    }
    Lane largest() const {
        Lane result = state[0];
        for (int i = 1; i < STATES; ++i) result = state[i] > result ? state[i] : result;
        return result;
    }
    Lanes operator*(const Lanes &other) const { return make([&](int i) { return state[i] * other.state[i]; }); }
    Lanes operator+(const Lanes &other) const { return make([&](int i) { return state[i] + other.state[i]; }); }
    Lanes operator-(const Lanes &other) const { return make([&](int i) { return state[i] - other.state[i]; }); }
    Lanes at_most(const Lane &limit) const { return make([&](int i) { return state[i] > limit ? limit : state[i]; }); }
    static Real at(const Lane &lane, [[maybe_unused]] int v) {
        if constexpr (WIDTH == 1)
            return lane;
        else
            return lane[v];
    }
};

#if STATES == 4
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
    Lanes at_most(Real limit) const { return {states > limit ? States{limit, limit, limit, limit} : states}; }
    static Real at(Real lane, int) { return lane; }
};
#endif

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
// Negative numbers have none.
template <class Line> inline typename Line::Lane logarithm(typename Line::Lane value) {
    using Real = typename Line::Real;
    using Lane = typename Line::Lane;
    using Form = Format<Real>;
    const Lane zero{}, lifted = value < Form::tiny ? value * Form::large : value;
    const auto exponent = exponent_of<Form, typename Line::Words>(lifted);
    const Lane one = lifted * two_to<Form, Lane>(-exponent), above = one > Real(1.4142135623730951) ? zero + 1 : zero;
    const Lane reduced = one - Real(0.5) * above * one, s = (reduced - 1) / (reduced + 1), square = s * s;
    constexpr int last = 2 * Form::terms - 1;
    Lane series = zero + Real(1) / last;
    for (int odd = last - 2; odd > 0; odd -= 2) series = series * square + Real(1) / odd;
    const Lane power = convert<Lane>(exponent) + above - (value < Form::tiny ? zero + Form::lift : zero);
    const Lane none = value == zero ? zero - Real(HUGE_VAL) : zero + Real(NAN);
    return value > zero ? 2 * s * series + Real(LOG_2) * power : none;
}

}  // namespace
