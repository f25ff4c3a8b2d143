//! The manual pages (section 1) of the programs and their commands, generated from their definitions in clap.
//!
//! In a crate of its own, so that none of it is linked into a program.

use std::{collections::BTreeMap, fs, io, path::Path};

use clap::{Command, CommandFactory as _};
use clap_mangen::Man;
use roff::{Roff, roman};

/// The section of the manual: user commands.
const SECTION: &str = "1";

/// Returns the pages by file name, such as `kas-config-check.1`.
///
/// # Errors
///
/// None, because the pages are written to memory.
pub fn pages() -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut pages = BTreeMap::new();
    for program in programs() {
        // The command `help` would add a page for each command, with the same text as `--help`.
        let mut program = program.disable_help_subcommand(true);
        program.build();
        // For the footer. Without the commit, so that a page changes only if its text does.
        let version = program.get_version().and_then(|version| version.split(',').next()).unwrap_or_default();
        let source = format!("{} {version}", program.get_name());
        add(&mut pages, &program, None, &source)?;
    }
    Ok(pages)
}

/// Writes the pages to a folder, which is created if necessary. Returns the number of pages.
///
/// # Errors
///
/// The folder or a file cannot be written.
pub fn write(folder: &Path) -> io::Result<usize> {
    let pages = pages()?;
    fs::create_dir_all(folder)?;
    for (name, page) in &pages {
        fs::write(folder.join(name), page)?;
    }
    Ok(pages.len())
}

/// Returns the command lines of the programs.
#[must_use]
pub fn programs() -> [Command; 3] {
    [kas::cli::Arguments::command(), agentk::cli::Arguments::command(), kasctl::command()]
}

/// Returns the visible subcommands of a command.
fn commands(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|sub| !sub.is_hide_set())
}

fn page_name(command: &Command) -> &str {
    command.get_display_name().unwrap_or_else(|| command.get_name())
}

fn add(
    pages: &mut BTreeMap<String, Vec<u8>>,
    command: &Command,
    parent: Option<&Command>,
    source: &str,
) -> io::Result<()> {
    let mut text = Vec::new();
    let man = Man::new(command.clone()).section(SECTION);
    // Not by clap_mangen: it would omit the empty date, and the next argument would take its place.
    Roff::new()
        .control("TH", [page_name(command), SECTION, "\"\"", source, "kas and agentk"])
        .to_writer(&mut text)?;
    man.render_name_section(&mut text)?;
    man.render_synopsis_section(&mut text)?;
    man.render_description_section(&mut text)?;
    man.render_options_section(&mut text)?;
    if commands(command).next().is_some() {
        man.render_subcommands_section(&mut text)?;
    }
    // Not by clap_mangen: it would join examples and tables into one paragraph.
    let help = command.get_after_long_help().or_else(|| command.get_after_help());
    if let Some(help) = help {
        after_help(&help.to_string()).to_writer(&mut text)?;
    }
    see_also(command, parent).to_writer(&mut text)?;
    pages.insert(man.get_filename(), without_repeated_definitions(&text));
    for sub in commands(command) {
        add(pages, sub, Some(command), source)?;
    }
    Ok(())
}

/// Converts the text below the flags in `--help` to sections.
fn after_help(help: &str) -> Roff {
    let mut roff = Roff::new();
    let mut is_aligned = false;
    let mut in_notes = false;
    for line in help.lines() {
        let is_indented = line.starts_with(' ');
        if is_indented != is_aligned && !line.is_empty() {
            // Indented lines are commands and tables, which are not filled.
            roff.control(if is_indented { "nf" } else { "fi" }, []);
            is_aligned = is_indented;
        }
        let heading = [("Examples:", "EXAMPLES"), ("Exit codes:", "EXIT STATUS"), ("Signals:", "SIGNALS")]
            .into_iter()
            .find_map(|(begin, name)| Some((name, line.strip_prefix(begin)?.trim())));
        if let Some((name, rest)) = heading {
            roff.control("SH", [name]);
            in_notes = false;
            if !rest.is_empty() {
                roff.text([roman(rest)]);
            }
        } else if is_indented {
            roff.text([roman(line)]);
        } else if line.is_empty() {
            // Starts the next paragraph, if there is one.
            roff.control("PP", []);
        } else {
            if !in_notes {
                roff.control("SH", ["NOTES"]);
                in_notes = true;
            }
            roff.text([roman(line)]);
        }
    }
    if is_aligned {
        roff.control("fi", []);
    }
    roff
}

/// Returns the section SEE ALSO: the parent of a command, or the other programs for a program.
fn see_also(command: &Command, parent: Option<&Command>) -> Roff {
    let names: Vec<String> = match parent {
        Some(parent) => vec![page_name(parent).to_owned()],
        None => {
            let others = programs().into_iter().map(|other| other.get_name().to_owned());
            others.filter(|other| other != command.get_name()).collect()
        }
    };
    let names: Vec<String> = names.iter().map(|name| format!("{name}({SECTION})")).collect();
    let mut roff = Roff::new();
    roff.control("SH", ["SEE ALSO"]);
    roff.text([roman(names.join(", "))]);
    roff
}

/// Removes repeated definitions, which every part of a page starts with.
fn without_repeated_definitions(page: &[u8]) -> Vec<u8> {
    const DEFINITION: [&str; 2] = [".ie \\n(.g .ds Aq \\(aq", ".el .ds Aq '"];
    let page = String::from_utf8_lossy(page);
    let mut seen = 0;
    let mut text = String::with_capacity(page.len());
    for line in page.lines() {
        if DEFINITION.contains(&line) {
            seen += 1;
            if seen > DEFINITION.len() {
                continue;
            }
        }
        text.push_str(line);
        text.push('\n');
    }
    text.into_bytes()
}
