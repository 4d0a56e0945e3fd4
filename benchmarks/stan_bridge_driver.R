# Bridge sampling of a Stan program's draws by R: run by stan_bridge.py with an R that has rstan and bridgesampling.
#
# Arguments: a folder with `program.stan`, `data.json`, and the number of repetitions. Writes `draws.csv`, a column for
# each parameter, after the chain's number, and `found.json`: for each method the log evidence, its error and CPU seconds.
# The error of warp bridge sampling is the spread of its repetitions, as bridgesampling advises: it has no other.

suppressPackageStartupMessages({
  library(rstan)
  library(bridgesampling)
  library(jsonlite)
})

given <- commandArgs(trailingOnly = TRUE)
folder <- given[1]
repetitions <- as.integer(given[2])
data <- fromJSON(file.path(folder, "data.json"))
fit <- stan(file.path(folder, "program.stan"), data = data, chains = 4, iter = 2000, cores = 1, seed = 1, refresh = 0)

drawn <- extract(fit, permuted = FALSE, inc_warmup = FALSE) # draws x chains x parameters
columns <- lapply(seq_len(dim(drawn)[2]), function(i) data.frame(chain = i, drawn[, i, ], check.names = FALSE))
write.csv(do.call(rbind, columns), file.path(folder, "draws.csv"), row.names = FALSE)

measured <- function(method) {
  runs <- lapply(seq_len(repetitions), function(i) {
    before <- proc.time()
    bridge <- bridge_sampler(fit, method = method, silent = TRUE)
    spent <- sum((proc.time() - before)[c("user.self", "sys.self")])
    error <- if (method == "normal") error_measures(bridge)$cv else NA
    list(value = bridge$logml, error = error, seconds = spent)
  })
  part <- function(name) sapply(runs, function(run) run[[name]])
  error <- if (method == "normal") median(part("error")) else sd(part("value"))
  list(value = median(part("value")), error = error, seconds = median(part("seconds")))
}
found <- list(bridge_sampling = measured("normal"), warp_bridge_sampling = measured("warp3"))
write(toJSON(found, auto_unbox = TRUE, digits = 15), file.path(folder, "found.json"))
