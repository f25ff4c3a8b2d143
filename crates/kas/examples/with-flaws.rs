//! The program `kas`, with the switches of the bug museum: see the feature `flaws`.

use std::process::ExitCode;

#[path = "../src/main.rs"]
mod program;

fn main() -> ExitCode {
    program::main()
}
