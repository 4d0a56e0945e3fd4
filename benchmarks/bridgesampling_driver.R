# Bridge sampling by the R package bridgesampling; run by evidence_peers.py with an R that has it, coda and jsonlite.
#
# A line of JSON in, a line out. The posterior draws come from random-walk Metropolis chains that start in, and propose
# with, the Laplace approximation at the mode, scaled as is optimal for a normal posterior. All chains move at once, as
# columns of a matrix: a loop over chains in R would take several times as long.

suppressPackageStartupMessages({
  library(bridgesampling)
  library(coda)
  library(jsonlite)
})

read_problem <- function(given) {
  problem <- list(X = as.matrix(given$design), y = as.numeric(given$response), prior_sd = given$prior_sd)
  problem$d <- ncol(problem$X)
  problem$noise_sd <- given$noise_sd # NULL: logistic
  problem
}

# The log posterior density of each column of B.
log_posteriors <- function(B, p) {
  eta <- p$X %*% B
  fit <- if (is.null(p$noise_sd)) {
    as.vector(crossprod(p$y, eta)) - colSums(pmax(eta, 0) + log1p(exp(-abs(eta))))
  } else {
    -length(p$y) / 2 * log(2 * pi * p$noise_sd^2) - colSums((p$y - eta)^2) / (2 * p$noise_sd^2)
  }
  fit - colSums(B^2) / (2 * p$prior_sd^2) - p$d / 2 * log(2 * pi * p$prior_sd^2)
}

# The same of one vector, in the form that bridge_sampler calls, a draw at a time.
log_posterior <- function(b, data) {
  eta <- as.vector(data$X %*% b)
  fit <- if (is.null(data$noise_sd)) {
    sum(data$y * eta) - sum(pmax(eta, 0) + log1p(exp(-abs(eta))))
  } else {
    -length(data$y) / 2 * log(2 * pi * data$noise_sd^2) - sum((data$y - eta)^2) / (2 * data$noise_sd^2)
  }
  fit - sum(b^2) / (2 * data$prior_sd^2) - data$d / 2 * log(2 * pi * data$prior_sd^2)
}

# Mode and covariance there, by Newton's method.
laplace <- function(p) {
  b <- numeric(p$d)
  for (i in 1:50) {
    eta <- as.vector(p$X %*% b)
    if (is.null(p$noise_sd)) {
      mean <- plogis(eta)
      weight <- mean * (1 - mean)
      residual <- p$y - mean
    } else {
      weight <- rep(1 / p$noise_sd^2, length(eta))
      residual <- (p$y - eta) / p$noise_sd^2
    }
    precision <- crossprod(p$X, weight * p$X) + diag(p$d) / p$prior_sd^2
    step <- solve(precision, as.vector(crossprod(p$X, residual)) - b / p$prior_sd^2)
    b <- b + step
    if (max(abs(step)) < 1e-10) break
  }
  list(mode = b, covariance = solve(precision))
}

sample_posterior <- function(p, s) {
  fit <- laplace(p)
  factor <- t(chol(fit$covariance))
  scale <- 2.38 / sqrt(p$d)
  state <- fit$mode + factor %*% matrix(rnorm(p$d * s$chains), p$d)
  value <- log_posteriors(state, p)
  kept <- array(NA_real_, c(s$draws, p$d, s$chains))
  for (i in seq_len(s$warmup + s$draws * s$thin)) {
    proposal <- state + scale * factor %*% matrix(rnorm(p$d * s$chains), p$d)
    proposed <- log_posteriors(proposal, p)
    accepted <- log(runif(s$chains)) < proposed - value
    state[, accepted] <- proposal[, accepted]
    value[accepted] <- proposed[accepted]
    after <- i - s$warmup
    if (after > 0 && after %% s$thin == 0) kept[after / s$thin, , ] <- state
  }
  names <- paste0("b", seq_len(p$d))
  as.mcmc.list(lapply(seq_len(s$chains), function(k) {
    chain <- kept[, , k]
    colnames(chain) <- names
    mcmc(chain)
  }))
}

estimate <- function(task) {
  p <- read_problem(task$problem)
  s <- task$settings
  set.seed(task$seed)
  begin <- proc.time()
  draws <- sample_posterior(p, s)
  sampled <- proc.time()
  bounds <- rep(Inf, p$d)
  names(bounds) <- paste0("b", seq_len(p$d))
  bridge <- bridge_sampler(
    samples = draws, log_posterior = log_posterior, data = p, lb = -bounds, ub = bounds, method = s$method,
    silent = TRUE
  )
  # The package has no error for the warped bridge.
  error <- if (s$method == "normal") sqrt(error_measures(bridge)$re2) else NA
  end <- proc.time()
  list(
    log_evidence = bridge$logml,
    standard_error = error,
    sampling_seconds = (sampled - begin)[["elapsed"]],
    processor_seconds = sum((end - begin)[c("user.self", "sys.self")]),
    evaluations = s$chains * (s$warmup + s$draws * s$thin) + 2 * s$chains * s$draws %/% 2
  )
}

say <- function(answer) {
  cat(toJSON(answer, auto_unbox = TRUE, digits = NA, na = "null"), "\n", sep = "")
  flush(stdout())
}

lines <- file("stdin", open = "r")
say(list(version = paste("R bridgesampling", packageVersion("bridgesampling"))))
while (length(line <- readLines(lines, n = 1)) > 0) say(estimate(fromJSON(line)))
