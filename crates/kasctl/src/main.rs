//! The program `kasctl`: arguments in, exit code out; nothing else is here.

fn main() -> std::process::ExitCode {
    kasctl::main()
}
