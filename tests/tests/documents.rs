//! Checks the documents: links have a target, programs accept the documented commands, and configuration
//! examples have only keys that kas knows.

#![allow(clippy::unwrap_used)] // a test may panic

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..").canonicalize().unwrap()
}

/// Returns all documents with their paths, including those of the charts.
fn documents() -> Vec<(PathBuf, String)> {
    let folders = ["", "docs", "docs/decisions", "deploy", "deploy/charts/kas", "deploy/charts/agentk"];
    let mut found = Vec::new();
    for folder in folders.map(|folder| root().join(folder)) {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.extension().is_some_and(|extension| extension == "md") {
                found.push((path.clone(), fs::read_to_string(&path).unwrap()));
            }
        }
    }
    found.sort();
    assert!(found.len() > 15, "{}", found.len());
    found
}

fn shown(path: &Path) -> String {
    path.strip_prefix(root()).unwrap_or(path).display().to_string()
}

/// Returns a document without fenced code blocks.
fn prose(text: &str) -> String {
    let mut is_code = false;
    let lines = text.lines().filter(|line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    });
    lines.collect::<Vec<_>>().join("\n")
}

/// Returns the fenced code blocks of one kind, with the line number of each.
fn fenced(text: &str, kind: &str) -> Vec<(usize, String)> {
    let mut found: Vec<(usize, String)> = Vec::new();
    let mut open = None;
    for (n, line) in text.lines().enumerate() {
        match (open, line.trim_start().strip_prefix("```")) {
            (None, Some(name)) => {
                open = Some(name.trim() == kind);
                if name.trim() == kind {
                    found.push((n + 2, String::new()));
                }
            }
            (Some(_), Some(_)) => open = None,
            (Some(true), None) => {
                let (_, block) = found.last_mut().unwrap();
                block.push_str(line);
                block.push('\n');
            }
            _ => {}
        }
    }
    found
}

/// Returns the anchors of the headings, as GitHub and GitLab form them.
fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text);
    let headings = headings.lines().filter(|line| line.starts_with('#'));
    headings
        .map(|line| {
            let title = line.trim_start_matches('#').trim().to_lowercase();
            let kept = title.chars().filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
            kept.map(|c| if c == ' ' { '-' } else { c }).collect()
        })
        .collect()
}

/// Returns the targets of links and images.
fn links(text: &str) -> Vec<String> {
    let prose = prose(text);
    let ends = prose.match_indices("](").filter_map(|(at, open)| {
        let rest = &prose[at + open.len()..];
        Some(rest[..rest.find(')')?].to_owned())
    });
    ends.collect()
}

#[test]
fn every_link_has_an_existing_target() {
    let (mut checked, mut broken) = (0, Vec::new());
    for (path, text) in documents() {
        for link in links(&text) {
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            checked += 1;
            let (file, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if file.is_empty() { path.clone() } else { path.parent().unwrap().join(file) };
            if !target.exists() {
                broken.push(format!("{}: no file {link}", shown(&path)));
            } else if !anchor.is_empty() && !anchors(&fs::read_to_string(&target).unwrap()).contains(anchor) {
                broken.push(format!("{}: no heading {link}", shown(&path)));
            }
        }
    }
    assert!(broken.is_empty(), "{}", broken.join("\n"));
    assert!(checked > 60, "only {checked} links were found");
}

#[test]
fn every_document_is_in_the_index() {
    let index = fs::read_to_string(root().join("docs/README.md")).unwrap();
    let named: BTreeSet<PathBuf> = links(&index)
        .iter()
        .filter_map(|link| root().join("docs").join(link.split('#').next()?).canonicalize().ok())
        .collect();
    for entry in fs::read_dir(root().join("docs")).unwrap() {
        let path = entry.unwrap().path();
        let is_document = path.extension().is_some_and(|extension| extension == "md");
        let is_index = path.ends_with("docs/README.md");
        assert!(
            !is_document || is_index || named.contains(&path),
            "docs/README.md does not name {}",
            shown(&path)
        );
    }
}

/// Splits a script into commands and their words, as far as the documents need it: quotes, comments,
/// continued lines and separators. `$(…)` starts a new command.
fn commands(script: &str) -> Vec<Vec<String>> {
    let mut commands = vec![vec![]];
    let mut word: Option<String> = None;
    let mut chars = script.chars().peekable();
    let mut is_redirect = false;
    let end = |word: &mut Option<String>, commands: &mut Vec<Vec<String>>, is_redirect: &mut bool| {
        if let Some(word) = word.take()
            && !std::mem::take(is_redirect)
        {
            commands.last_mut().unwrap().push(word);
        }
    };
    while let Some(c) = chars.next() {
        match c {
            '\\' => match chars.next() {
                Some('\n') | None => {}
                Some(escaped) => word.get_or_insert_default().push(escaped),
            },
            '\'' | '"' => {
                let word = word.get_or_insert_default();
                while let Some(inner) = chars.next().filter(|inner| *inner != c) {
                    word.push(inner);
                }
            }
            '#' if word.is_none() => while chars.next_if(|c| *c != '\n').is_some() {},
            '>' | '<' => {
                // A number before it is a file descriptor.
                word = word.take().filter(|word| !word.chars().all(|c| c.is_ascii_digit()));
                end(&mut word, &mut commands, &mut is_redirect);
                while chars.next_if(|c| ['>', '&'].contains(c)).is_some() {}
                is_redirect = true;
            }
            '\n' | ';' | '|' | '&' | '(' | ')' => {
                end(&mut word, &mut commands, &mut is_redirect);
                is_redirect = false;
                commands.push(vec![]);
            }
            c if c.is_whitespace() => end(&mut word, &mut commands, &mut is_redirect),
            c => word.get_or_insert_default().push(c),
        }
    }
    end(&mut word, &mut commands, &mut is_redirect);
    commands.retain(|words| !words.is_empty());
    commands
}

#[test]
fn commands_are_split_as_a_shell_does() {
    let script = "FOO=1 kas --a 'b c' & sleep 1 # no\nkasctl x \\\n  -y > out 2>&1 | jq '.z' && a \"$(kasctl t)\"; b < <(kas d)";
    let got: Vec<String> = commands(script).iter().map(|words| words.join("␣")).collect();
    assert_eq!(got, ["FOO=1␣kas␣--a␣b c", "sleep␣1", "kasctl␣x␣-y", "jq␣.z", "a␣$(kasctl t)", "b", "kas␣d"]);
}

#[test]
fn every_documented_command_is_accepted_by_its_program() {
    let programs = man::programs();
    let (mut checked, mut refused) = (0, Vec::new());
    for (path, text) in documents() {
        for (line, script) in fenced(&text, "sh") {
            for words in commands(&script) {
                let words: Vec<&String> = words
                    .iter()
                    .skip_while(|word| {
                        word.split('=').next().is_some_and(|name| {
                            word.contains('=') && name.chars().all(|c| c.is_ascii_uppercase() || c == '_')
                        })
                    })
                    .collect();
                let Some(program) = programs
                    .iter()
                    .find(|program| words.first().is_some_and(|word| *word == program.get_name()))
                else {
                    continue;
                };
                checked += 1;
                if let Err(error) = program.clone().try_get_matches_from(&words)
                    && error.use_stderr()
                {
                    refused.push(format!("{}:{line}: {words:?}: {error}", shown(&path)));
                }
            }
        }
    }
    assert!(refused.is_empty(), "{}", refused.join("\n"));
    assert!(checked >= 10, "only {checked} commands were found");
}

#[test]
fn each_program_prints_valid_completions_with_all_commands() {
    let dir = tempfile::tempdir().unwrap();
    for program in man::programs() {
        let name = program.get_name().to_owned();
        let binary = testkit::process::program(&name).unwrap();
        for shell in ["bash", "zsh", "fish"] {
            let done = Command::new(&binary).args(["completions", shell]).output().unwrap();
            assert!(done.status.success(), "{name} completions {shell}: {done:?}");
            let script = String::from_utf8(done.stdout).unwrap();
            for command in program.get_subcommands().filter(|command| !command.is_hide_set()) {
                assert!(script.contains(command.get_name()), "{name}, {shell}: {}", command.get_name());
            }
            if shell == "bash" {
                let file = dir.path().join(&name);
                fs::write(&file, script).unwrap();
                let read = Command::new("bash").arg("-n").arg(&file).output().unwrap();
                assert!(read.status.success(), "{name}: {read:?}");
            }
        }
    }
}

#[test]
fn documented_configuration_has_only_known_keys() {
    let environment = kas_config::Environment::of_process();
    let (mut checked, mut unknown) = (0, Vec::new());
    for (path, text) in documents() {
        for (line, file) in fenced(&text, "yaml") {
            // Other blocks are for Kubernetes or proxies, or are the list of agents.
            const SECTIONS: [&str; 8] = [
                "agent:",
                "api:",
                "gitlab:",
                "private_api:",
                "discovery:",
                "tracker:",
                "redis:",
                "observability:",
            ];
            if !file.lines().any(|line| SECTIONS.iter().any(|section| line.starts_with(section))) {
                continue;
            }
            checked += 1;
            let problems = match kas_config::load(&file, &environment) {
                Ok(loaded) => loaded
                    .warnings
                    .iter()
                    .map(|warning| format!("{}: {}", warning.path, warning.text))
                    .collect(),
                // A fragment lacks files and sections; only unknown keys matter here.
                Err(problems) => {
                    let warnings = problems.warnings().iter().map(ToString::to_string);
                    problems.iter().map(ToString::to_string).chain(warnings).collect::<Vec<_>>()
                }
            };
            unknown.extend(
                problems
                    .into_iter()
                    .filter(|problem| problem.contains("unknown"))
                    .map(|problem| format!("{}:{line}: {problem}", shown(&path))),
            );
        }
    }
    assert!(unknown.is_empty(), "{}", unknown.join("\n"));
    assert!(checked >= 7, "only {checked} files were found");
}
