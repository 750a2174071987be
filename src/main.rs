//! The binary `muster`: passes the arguments to [`muster::cli`] and exits with the code that it returns.

fn main() -> std::process::ExitCode {
    muster::cli::main()
}
