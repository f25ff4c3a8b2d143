//! Checks that comments are not wider than code: rustfmt only wraps code.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use devkit::{report::line, workspace};

/// Prints each comment that is wider than `max_width` in rustfmt.toml. Returns whether there is none.
pub(crate) fn run() -> Result<bool> {
    let root = workspace::root();
    let rustfmt = fs::read_to_string(root.join("rustfmt.toml")).context("cannot read rustfmt.toml")?;
    let width = max_width(&rustfmt).context("rustfmt.toml has no max_width")?;
    let mut files = Vec::new();
    sources(root, &mut files).context("cannot list the sources")?;
    files.sort();
    let mut found = 0;
    for (path, marker) in files {
        let text = fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        let shown = path.strip_prefix(root).unwrap_or(&path).display();
        for (number, length) in too_wide(&text, marker, width) {
            found += 1;
            line(format_args!(
                "error: {shown}:{number}: this comment has {length} columns, of {width} at most"
            ));
        }
    }
    Ok(found == 0)
}

fn max_width(rustfmt: &str) -> Option<usize> {
    let value = rustfmt.lines().find_map(|line| line.strip_prefix("max_width"))?;
    value.trim().strip_prefix('=')?.trim().parse().ok()
}

/// Lists the checked files, each with its comment prefix.
fn sources(folder: &Path, files: &mut Vec<(PathBuf, &'static str)>) -> io::Result<()> {
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            let hidden = name.starts_with('.') && ![".ci", ".cargo", ".config"].contains(&&*name);
            if !hidden && name != "target" {
                sources(&path, files)?;
            }
            continue;
        }
        let is_script = path.ends_with(".ci/run");
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("rs" | "proto") => files.push((path, "//")),
            Some("toml" | "sh" | "py") => files.push((path, "#")),
            None if is_script => files.push((path, "#")),
            _ => {}
        }
    }
    Ok(())
}

/// Returns the line numbers of comments that are too wide, with their widths in characters. Unbreakable text
/// may be wider: a table row, one long word such as a URL, and the target of a link.
fn too_wide<'a>(
    text: &'a str,
    marker: &'a str,
    width: usize,
) -> impl Iterator<Item = (usize, usize)> + use<'a> {
    text.lines().enumerate().filter_map(move |(index, line)| {
        let comment = line.trim_start().strip_prefix(marker)?.trim_start_matches(['/', '!', '#']).trim();
        let length = line.chars().count();
        let link =
            comment.starts_with('[') && comment.contains("]: ") && comment.split_whitespace().count() == 2;
        let whole = comment.starts_with('|') || !comment.contains(char::is_whitespace) || link;
        (length > width && !whole).then_some((index + 1, length))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lines(text: &str, marker: &'static str) -> Vec<usize> {
        too_wide(text, marker, 20).map(|(number, _)| number).collect()
    }

    #[test]
    fn comments_beyond_the_width_are_found() {
        let text = "// exactly this wide\n/// one more than that\nlet code = \"is not checked here\";\n  //! in all it has 25\n";
        assert_eq!(lines(text, "//"), [2, 4]);
        assert_eq!(lines("# a comment in a shell script\necho 1 # not this\n", "#"), [1]);
    }

    #[test]
    fn characters_are_counted_and_not_bytes() {
        assert!(lines("// äöü äöü äöü äöü ä\n", "//").is_empty());
    }

    #[test]
    fn unbreakable_words_may_exceed_the_width() {
        let text =
            "/// https://example.com/a/b\n/// [name]: https://example.com\n/// | a row | of a table |\n";
        assert!(lines(text, "//").is_empty());
        assert_eq!(lines("/// see https://example.com/a/b\n", "//"), [1]);
    }

    #[test]
    fn the_width_is_that_of_rustfmt() {
        assert_eq!(max_width("edition = \"2024\"\nmax_width = 110\n"), Some(110));
        assert_eq!(max_width("edition = \"2024\"\n"), None);
    }
}
