//! The pages of the manual, section 1: one for each program and each of its commands, as clap describes them.
//!
//! A package of its own, so that none of it is linked into a program.

use std::{collections::BTreeMap, fs, io, path::Path};

use clap::{Command, CommandFactory as _};
use clap_mangen::Man;
use roff::{Roff, roman};

/// The section of the manual: user commands.
const SECTION: &str = "1";

/// Returns the pages by the names of their files, such as `kas-config-check.1`.
///
/// # Errors
///
/// None: what is written to is memory.
pub fn pages() -> io::Result<BTreeMap<String, Vec<u8>>> {
    let mut pages = BTreeMap::new();
    for program in programs() {
        // That command would be a page for every other, with nothing in it that `--help` has not.
        let mut program = program.disable_help_subcommand(true);
        program.build();
        // What stands at the foot of each page: without the commit, so that pages change when their texts do.
        let version = program.get_version().and_then(|version| version.split(',').next()).unwrap_or_default();
        let source = format!("{} {version}", program.get_name());
        add(&mut pages, &program, None, &source)?;
    }
    Ok(pages)
}

/// Writes the pages into a folder, which is made when it is not there. Returns how many there are.
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

/// Returns what the programs say of their command lines.
#[must_use]
pub fn programs() -> [Command; 3] {
    [kas::cli::Arguments::command(), agentk::cli::Arguments::command(), kasctl::command()]
}

/// Returns the commands below one that a person sees.
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
    // Not clap_mangen's own: it leaves no place for the date, which is none, and would put the next one there.
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
    // Not clap_mangen's own: that makes one paragraph of examples and tables.
    let help = command.get_after_long_help().or_else(|| command.get_after_help());
    if let Some(help) = help {
        after_help(&help.to_string()).to_writer(&mut text)?;
    }
    see_also(command, parent).to_writer(&mut text)?;
    pages.insert(man.get_filename(), once(&text));
    for sub in commands(command) {
        add(pages, sub, Some(command), source)?;
    }
    Ok(())
}

/// Makes sections of what stands below a command's flags in `--help`.
fn after_help(help: &str) -> Roff {
    let mut roff = Roff::new();
    let mut is_aligned = false;
    let mut in_notes = false;
    for line in help.lines() {
        let is_indented = line.starts_with(' ');
        if is_indented != is_aligned && !line.is_empty() {
            // Indented lines stay as they are: commands, tables.
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
            // Of the paragraph that follows, if one does.
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

/// Names the command above, those below are listed already, and of a program the others.
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

/// Leaves out what every part of a page begins with, other than the first time.
fn once(page: &[u8]) -> Vec<u8> {
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
