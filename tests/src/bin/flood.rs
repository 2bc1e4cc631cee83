//! Executable `flood`, which runs [`tests::flood`].
#![allow(clippy::print_stderr, reason = "a program's errors are for its user")]

use std::process::ExitCode;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    match tests::flood::main(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("flood: {error}");
            ExitCode::FAILURE
        }
    }
}
