# Bridge sampling by the R package bridgesampling, from independent posterior draws; run by bring_your_own_density.py.
#
# Arguments: a table whose first column is the response and whose others are the design, the number of draws, and the
# shape, rate and spread of the prior. Lines of results go out: method, log evidence, standard error.

suppressPackageStartupMessages(library(bridgesampling))

given <- commandArgs(TRUE)
table <- as.matrix(read.csv(given[1], header = FALSE))
y <- table[, 1]
X <- table[, -1]
count <- as.integer(given[2])
prior <- as.numeric(given[3:5]) # shape, rate, spread
n <- length(y)
d <- ncol(X)

# The posterior is normal given the variance, which has an inverse gamma distribution.
precision <- crossprod(X) + diag(d) / prior[3]^2
mean <- solve(precision, crossprod(X, y))
rate <- prior[2] + 0.5 * (sum(y^2) - sum(mean * (precision %*% mean)))
set.seed(0)
variance <- 1 / rgamma(count, prior[1] + n / 2, rate)
noise <- matrix(rnorm(count * d), count) %*% t(backsolve(chol(precision), diag(d)))
samples <- cbind(matrix(mean, count, d, byrow = TRUE) + sqrt(variance) * noise, variance)
colnames(samples) <- c(paste0("beta", seq_len(d)), "variance")

log_posterior <- function(row, data) {
  variance <- row[["variance"]]
  beta <- row[seq_len(d)]
  sum(dnorm(y, X %*% beta, sqrt(variance), log = TRUE)) +
    sum(dnorm(beta, 0, prior[3] * sqrt(variance), log = TRUE)) +
    dgamma(1 / variance, prior[1], prior[2], log = TRUE) - 2 * log(variance)
}

low <- c(rep(-Inf, d), 0)
high <- rep(Inf, d + 1)
names(low) <- names(high) <- colnames(samples)
for (method in c("normal", "warp3")) {
  found <- bridge_sampler(
    samples = samples, log_posterior = log_posterior, data = NULL, lb = low, ub = high, method = method, silent = TRUE
  )
  # The package has no error for the warped bridge.
  error <- if (method == "normal") sqrt(error_measures(found)$re2) else NA
  cat(method, format(found$logml, digits = 12), error, "\n")
}
