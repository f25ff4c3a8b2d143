//! The pages contain what the command lines define. They are rendered by `man`, or by hand where it is not
//! installed.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    collections::BTreeSet,
    fs,
    path::Path,
    process::{Command, Stdio},
};

use clap::Command as Cli;

/// Calls `with` for each visible command and the name of its page.
fn each_command(with: &mut impl FnMut(&Cli, &str)) {
    fn walk(command: &Cli, with: &mut impl FnMut(&Cli, &str)) {
        let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
        with(command, &name);
        command.get_subcommands().filter(|sub| !sub.is_hide_set()).for_each(|sub| walk(sub, with));
    }
    for program in man::programs() {
        let mut program = program.disable_help_subcommand(true);
        program.build();
        walk(&program, with);
    }
}

/// Returns a page as displayed, wide enough that no line is wrapped.
fn rendered(page: &Path) -> String {
    // `-P`: man would use a pager of the environment even with a pipe.
    let man = Command::new("man")
        .args([
            "--warnings=w",
            "--encoding=UTF-8",
            "--no-hyphenation",
            "--no-justification",
            "-P",
            "cat",
            "-l",
        ])
        .arg(page)
        .envs([("MANWIDTH", "400"), ("LC_ALL", "C.UTF-8"), ("GROFF_NO_SGR", "1")])
        .env_remove("MAN_KEEP_FORMATTING")
        .stdin(Stdio::null())
        .output();
    match man {
        Ok(output) => {
            let errors = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success() && errors.is_empty(), "{}: {errors}", page.display());
            let text = String::from_utf8(output.stdout).unwrap();
            // Bold is a letter, a backspace, and the letter again.
            let mut plain = String::with_capacity(text.len());
            for c in text.chars() {
                if c == '\u{8}' {
                    plain.pop();
                } else {
                    plain.push(c);
                }
            }
            plain
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => by_hand(&fs::read_to_string(page).unwrap()),
        Err(e) => panic!("man: {e}"),
    }
}

/// Removes escapes and fonts.
fn by_hand(page: &str) -> String {
    page.lines()
        .filter(|line| !line.starts_with(".ie ") && !line.starts_with(".el "))
        .map(|line| {
            let line = line.strip_prefix(".SH ").unwrap_or(line);
            let text = ["\\fB", "\\fI", "\\fR", "\\&"].iter().fold(line.to_owned(), |t, e| t.replace(e, ""));
            text.replace("\\-", "-").replace("\\*(Aq", "'").replace("\\\\", "\\") + "\n"
        })
        .collect()
}

#[test]
fn every_command_has_a_page_with_its_flags_and_examples() {
    let folder = tempfile::tempdir().unwrap();
    let count = man::write(folder.path()).unwrap();
    let mut pages = BTreeSet::new();
    let mut flags = 0;
    each_command(&mut |command, name| {
        let page = folder.path().join(format!("{name}.1"));
        let text = rendered(&page);
        let lines: BTreeSet<&str> = text.lines().map(str::trim).collect();
        assert!(lines.contains("NAME") && lines.contains("SYNOPSIS"), "{name}: {text}");
        for argument in command.get_arguments().filter(|argument| !argument.is_hide_set()) {
            if let Some(long) = argument.get_long() {
                let flag = format!("--{long}");
                assert!(lines.iter().any(|line| line.contains(&flag)), "{name} lacks {flag}: {text}");
                flags += 1;
            }
            if let Some(variable) = argument.get_env() {
                let variable = variable.to_str().unwrap();
                assert!(text.contains(variable), "{name} lacks {variable}: {text}");
            }
        }
        for sub in command.get_subcommands().filter(|sub| !sub.is_hide_set()) {
            let below = format!("{name}-{}(1)", sub.get_name());
            assert!(text.contains(&below), "{name} lacks {below}: {text}");
        }
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        for line in help.lines().filter(|line| line.starts_with(' ')) {
            assert!(lines.contains(line.trim()), "{name} lacks the line {line}: {text}");
        }
        pages.insert(format!("{name}.1"));
    });
    let written: BTreeSet<String> = fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    assert_eq!(written, pages);
    assert_eq!(written.len(), count);
    for page in ["kas.1", "kas-config-check.1", "agentk.1", "agentk-doctor.1", "kasctl-token-agent.1"] {
        assert!(written.contains(page), "{written:?}");
    }
    // Without any flag, the checks above would check nothing.
    assert!(flags > 60, "{flags}");
}

#[test]
fn hidden_flags_and_the_command_help_are_in_no_page() {
    for (name, page) in man::pages().unwrap() {
        let page = String::from_utf8(page).unwrap();
        assert!(!page.contains("bench\\-module"), "{name}");
        assert!(!name.contains("help"), "{name}");
    }
}

#[test]
fn pages_are_reproducible_and_contain_only_the_version() {
    let pages = man::pages().unwrap();
    assert_eq!(man::pages().unwrap(), pages);
    let first = String::from_utf8(pages["kasctl-why.1"].clone()).unwrap();
    let title = first.lines().find(|line| line.starts_with(".TH ")).unwrap();
    let version = env!("CARGO_PKG_VERSION");
    assert_eq!(title, format!(".TH kasctl-why 1 \"\" \"kasctl v{version}\" \"kas and agentk\""));
    assert!(first.contains(".SH \"SEE ALSO\"\nkasctl(1)\n"), "{first}");
}
