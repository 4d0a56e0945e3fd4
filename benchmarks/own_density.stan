data {
  int<lower=0> n;
  int<lower=0> d;
  matrix[n, d] x;
  vector[n] y;
}
parameters {
  vector[d] beta;
  real<lower=0> variance;
}
model {
  variance ~ inv_gamma(3, 2);
  beta ~ normal(0, 2 * sqrt(variance));
  y ~ normal(x * beta, sqrt(variance));
}
