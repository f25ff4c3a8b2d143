//! The program `sim` from outside: seeds that once failed, and that a seed decides everything.

use std::process::{Command, Output};

fn sim(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_sim")).args(arguments).output().expect("sim runs")
}

#[track_caller]
fn passes(arguments: &[&str]) -> String {
    let output = sim(arguments);
    let said = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{arguments:?}\n{said}{}", String::from_utf8_lossy(&output.stderr));
    said
}

/// Two processes each, which have other addresses, other hash seeds and another clock.
#[test]
fn a_seed_decides_everything() {
    let digest = |seed: &str, more: &[&str]| {
        let arguments = ["--seed", seed, "--replicas", "3", "--agents", "10", "--minutes", "0.2"];
        let output = sim(&[&arguments[..], more].concat());
        let said = String::from_utf8_lossy(&output.stdout).into_owned();
        said.lines().find(|line| line.starts_with("digest")).expect("a digest").to_owned()
    };
    let first = digest("11", &[]);
    assert_eq!(first, digest("11", &[]));
    assert_eq!(first, digest("11", &["--trace"]), "a replay with a trace is another run");
    assert_ne!(first.rsplit(' ').next(), digest("12", &[]).rsplit(' ').next());
}

#[test]
fn seeds_that_failed_once_pass() {
    let lines = include_str!("../regressions").lines().filter(|line| !line.starts_with('#'));
    for line in lines {
        let words: Vec<&str> = line.split_whitespace().take(4).collect();
        let [seed, replicas, agents, minutes] = words[..] else { panic!("{line:?}: four numbers first") };
        passes(&["--seed", seed, "--replicas", replicas, "--agents", agents, "--minutes", minutes]);
    }
}

/// Fails if the checks have become blind. A request must wait in a calm time to show a lost wake-up, as in
/// two seeds of three.
#[test]
fn flaws_are_found_by_few_seeds() {
    for (flaw, seeds) in [("clean-end", "1"), ("kept-agents", "1"), ("lost-wake-ups", "3"), ("repeat", "1")] {
        let few = ["--seeds", seeds, "--replicas", "3", "--agents", "10", "--minutes", "0.25"];
        let output = sim(&[&few[..], &["--flaw", flaw]].concat());
        let said = String::from_utf8_lossy(&output.stdout);
        assert_eq!(output.status.code(), Some(1), "{flaw}: {said}");
        assert!(said.contains("failed:"), "{flaw}: {said}");
    }
}

#[test]
fn arguments_that_simulate_nothing_are_refused() {
    for arguments in [["--replicas", "1"], ["--minutes", "0"], ["--agents", "x"], ["--rate", "0"]] {
        let output = sim(&arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
    // No seed at all.
    assert_eq!(sim(&["--seeds", "0"]).status.code(), Some(1));
}
