//! The program `man`, which writes the manual pages. `cargo xtask man` builds and runs it.

use std::{io::Write as _, path::PathBuf, process::ExitCode};

use clap::Parser;

/// Writes the manual pages of kas, agentk and kasctl.
#[derive(Parser)]
#[command(name = "man")]
struct Arguments {
    /// Output folder, which is created if necessary.
    folder: PathBuf,
}

fn main() -> ExitCode {
    let folder = Arguments::parse().folder;
    match man::write(&folder) {
        Ok(count) => {
            let shown = folder.display();
            // There is nothing left to do when standard output is closed.
            let _ = writeln!(
                std::io::stdout(),
                "{count} manual pages in {shown}; to read one: man -l {shown}/kas.1"
            );
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("cannot write the manual pages to {}: {error}", folder.display());
            ExitCode::FAILURE
        }
    }
}
