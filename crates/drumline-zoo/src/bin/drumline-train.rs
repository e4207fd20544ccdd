//! The program behind `drumline train`, `drumline test` and `drumline data`.
#![forbid(unsafe_code)]

use std::process::ExitCode;

fn main() -> ExitCode {
    drumline_zoo::program::main()
}
