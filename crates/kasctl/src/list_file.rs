//! Adds an entry to a file of kas that lists agents or users, atomically and at most once.
//! The entry is appended to the text, which keeps its comments. Then the new text is parsed as YAML, and must
//! have the content of the old one and one more entry.

use std::{
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use serde_json::Value;

use crate::{
    file_error::FileError,
    jwt,
    new_version::{self, NewVersion},
    yaml::parse,
};

/// The mode of a new file. Hashes are not secret, but others must not add entries.
const MODE: u32 = 0o600;

/// A kind of file: what it lists, and how this tool adds to it.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct List {
    /// The key of the list.
    key: &'static str,
    /// An entry.
    entry: &'static str,
    /// The flag for the file.
    flag: &'static str,
}

impl List {
    /// Returns what an entry is called.
    pub(crate) fn entry(&self) -> &'static str {
        self.entry
    }
}

/// The identity file.
pub(crate) const AGENTS: &List = &List { key: "agents", entry: "agent", flag: "--agents-file" };
/// The file with users of the Kubernetes API endpoint.
pub(crate) const USERS: &List = &List { key: "users", entry: "user", flag: "--users-file" };

/// The entry to add.
#[derive(Debug)]
pub(crate) struct Entry<'a> {
    /// The list.
    pub(crate) list: &'static List,
    /// The id, which is unique, if entries have one.
    pub(crate) id: Option<i64>,
    /// The name, which is unique: the configuration of an agent is found by it, and rules name users by it.
    pub(crate) name: &'a str,
    /// The list item as lines without indentation.
    pub(crate) item: &'a str,
}

/// The reason why the file does not permit an entry.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    /// Another entry has the id.
    #[error(
        "it already contains agent {id}, with the name {name}: use another id, or add a second hash to its tokens \
         ('kasctl token agent' without --agents-file prints one)"
    )]
    Id {
        /// The id.
        id: i64,
        /// The name in the file.
        name: String,
    },
    /// Another agent has the name.
    #[error("agent {id} already has the name {name}: use another name")]
    Name {
        /// The id in the file.
        id: String,
        /// The name.
        name: String,
    },
    /// Another user has the name.
    #[error(
        "it already contains user {name}: use another name, or add a second hash to its tokens ('kasctl token user' \
         without --users-file prints one)"
    )]
    User {
        /// The name.
        name: String,
    },
    /// It is not YAML, not such a list, or the list is not at its end.
    #[error(
        "it is not a list of {key} that an entry can be appended to: expected YAML that ends with the list '{key}:'; \
         without {flag} the entry is printed, so that you can insert it yourself",
        key = .0.key,
        flag = .0.flag
    )]
    Shape(&'static List),
    /// It is a directory, a device or a pipe.
    #[error("it is not a regular file")]
    NotAFile,
}

/// Why an entry was not added. The file is unchanged.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Error {
    /// The file does not permit the entry.
    #[error("cannot add the {} to {}: {cause}", .list.entry, .path.display())]
    Refused {
        /// The list.
        list: &'static List,
        /// The file.
        path: PathBuf,
        /// The reason.
        #[source]
        cause: Refused,
    },
    /// The file cannot be read or written.
    #[error(transparent)]
    File(#[from] FileError),
    /// There are no random bytes for the name of the new version.
    #[error(transparent)]
    Random(#[from] jwt::Error),
}

/// A new version of the file, complete and on disk next to the old one.
///
/// Other processes that add entries wait until this is dropped. Without [`Prepared::commit`], the old version
/// stays.
#[derive(Debug)]
pub(crate) struct Prepared {
    path: PathBuf,
    version: NewVersion,
}

/// Writes a new version of the file with the entry. Does not replace the old one yet.
///
/// # Errors
/// The file does not permit the entry, or cannot be read or written. It is unchanged.
pub(crate) fn prepare(path: &Path, entry: &Entry<'_>) -> Result<Prepared, Error> {
    let failed = |verb| move |cause| FileError { verb, path: path.to_owned(), cause };
    let target = new_version::target(path).map_err(failed("read"))?;
    let directory = File::open(new_version::directory(&target)).map_err(failed("create"))?;
    // Without a lock, two processes could each add an entry to the same old version. Some network file
    // systems have no locks; the operator must not run two processes at the same time there.
    match directory.lock() {
        Err(e) if e.kind() != io::ErrorKind::Unsupported => return Err(failed("lock")(e).into()),
        _ => {}
    }
    let (old, owner) = match fs::metadata(&target) {
        Ok(found) if !found.is_file() => {
            let (list, path) = (entry.list, path.to_owned());
            return Err(Error::Refused { list, path, cause: Refused::NotAFile });
        }
        Ok(found) => (Some(fs::read_to_string(&target).map_err(failed("read"))?), Some(found)),
        Err(e) if e.kind() == io::ErrorKind::NotFound => (None, None),
        Err(e) => return Err(failed("read")(e).into()),
    };
    let text = appended(old.as_deref().unwrap_or_default(), entry).map_err(|cause| Error::Refused {
        list: entry.list,
        path: path.to_owned(),
        cause,
    })?;

    let unique = jwt::unique_id().map_err(jwt::Error::from)?;
    let mode = owner.as_ref().map_or(MODE, |owner| owner.mode() & 0o7777);
    let version = NewVersion::write(directory, &target, &unique, owner.as_ref(), mode, &text);
    Ok(Prepared { version: version.map_err(failed("write"))?, path: target })
}

impl Prepared {
    /// Replaces the old version atomically.
    ///
    /// # Errors
    /// The old version cannot be replaced, and stays.
    pub(crate) fn commit(self) -> Result<(), Error> {
        let Self { path, version } = self;
        Ok(version.commit().map_err(|cause| FileError { verb: "write", path, cause })?)
    }
}

/// Returns the text with the entry appended to its list.
fn appended(old: &str, entry: &Entry<'_>) -> Result<String, Refused> {
    let key = entry.list.key;
    let shape = || Refused::Shape(entry.list);
    let root = parse(old).ok_or_else(shape)?;
    let mut expected = match root {
        // Empty, or only comments.
        Value::Null => serde_json::json!({ key: [] }),
        root => root,
    };
    let list = expected.get_mut(key).ok_or_else(shape)?;
    if list.is_null() {
        *list = Value::Array(Vec::new());
    }
    let Value::Array(list) = list else { return Err(shape()) };
    for other in list.iter() {
        let field = |name| other.get(name).map(plain).unwrap_or_default();
        if let Some(id) = entry.id.filter(|id| field("id") == id.to_string()) {
            return Err(Refused::Id { id, name: field("name") });
        }
        if field("name") == entry.name {
            let name = entry.name.to_owned();
            return Err(match entry.id {
                Some(_) => Refused::Name { id: field("id"), name },
                None => Refused::User { name },
            });
        }
    }
    let was_empty = list.is_empty();
    let Some(Value::Array(item)) = parse(entry.item) else { return Err(shape()) };
    list.extend(item);

    let mut bases = vec![old.to_owned()];
    if !has_key(old, key) {
        bases.push(with_key(old, key));
    }
    if was_empty {
        bases.push(opened(old, key));
    }
    for mut base in bases {
        if !base.is_empty() && !base.ends_with('\n') {
            base.push('\n');
        }
        // The indentation of an existing list is not known.
        for indent in ["  ", "", "    "] {
            let mut text = base.clone();
            for line in entry.item.lines() {
                text.push_str(indent);
                text.push_str(line);
                text.push('\n');
            }
            if parse(&text).as_ref() == Some(&expected) {
                return Ok(text);
            }
        }
    }
    Err(shape())
}

fn has_key(text: &str, key: &str) -> bool {
    text.lines().any(|line| line.strip_prefix(key).is_some_and(|rest| rest.starts_with(':')))
}

fn with_key(text: &str, key: &str) -> String {
    let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    format!("{text}{end}{key}:\n")
}

/// Replaces an empty list such as `agents: []` by `agents:`.
fn opened(text: &str, key: &str) -> String {
    let line = |line: &str| {
        let (found, rest) = line.split_once(':')?;
        let rest = rest.trim_start();
        let after = ["[]", "~", "null"].iter().find_map(|empty| rest.strip_prefix(empty))?;
        (found == key).then(|| format!("{key}:{}", after.trim_end()))
    };
    text.lines().map(|l| line(l).unwrap_or_else(|| l.to_owned()) + "\n").collect()
}

/// Returns a number or a string as text: `name: 1` is the name "1".
fn plain(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    const ITEM: &str = "- id: 7\n  name: demo\n  project_id: 3\n  tokens:\n    - sha256:ab\n";

    fn append(old: &str) -> Result<String, Refused> {
        appended(old, &Entry { list: AGENTS, id: Some(7), name: "demo", item: ITEM })
    }

    fn indented(spaces: usize) -> String {
        ITEM.lines().map(|line| format!("{}{line}\n", " ".repeat(spaces))).collect()
    }

    #[test]
    fn an_empty_file_becomes_a_list_of_one() {
        for nothing in ["", "# a comment\n", "# without a newline"] {
            let text = append(nothing).unwrap();
            assert!(text.starts_with(nothing), "{text}");
            assert!(text.ends_with(&format!("agents:\n{}", indented(2))), "{text}");
        }
        assert_eq!(append("").unwrap(), format!("agents:\n{}", indented(2)));
    }

    #[test]
    fn existing_text_is_kept() {
        let first = "- id: 1\n  name: one # first\n  project_id: 3\n  tokens: [sha256:cd]\n";
        let two: String = first.lines().map(|line| format!("  {line}\n")).collect();
        let four: String = first.lines().map(|line| format!("    {line}\n")).collect();
        for (list, spaces) in [(first, 0), (two.as_str(), 2), (four.as_str(), 4)] {
            let old = format!("# those of kas\nagents:\n{list}");
            assert_eq!(append(&old).unwrap(), format!("{old}{}", indented(spaces)));
            // Without a line break at the end.
            assert_eq!(append(old.trim_end()).unwrap(), format!("{old}{}", indented(spaces)));
        }
        // A list of tokens with the indentation of the entry.
        let old = "agents:\n- id: 1\n  name: one\n  project_id: 3\n  tokens:\n  - sha256:cd\n";
        assert_eq!(append(old).unwrap(), format!("{old}{}", indented(0)));
    }

    #[test]
    fn an_empty_list_is_opened() {
        for old in ["agents:\n", "agents: []\n", "agents: ~", "agents: null\n", "agents: [] # none\n"] {
            let text = append(old).unwrap();
            assert_eq!(parse(&text).unwrap()["agents"][0]["id"], 7, "{text}");
        }
        assert!(append("agents: [] # none\n").unwrap().contains("# none"));
    }

    #[test]
    fn ids_and_names_are_unique() {
        let other = |id: &str, name: &str| {
            append(&format!("agents:\n  - id: {id}\n    name: {name}\n    project_id: 9\n    tokens: []\n"))
        };
        assert_eq!(other("7", "other"), Err(Refused::Id { id: 7, name: "other".to_owned() }));
        assert_eq!(other("8", "demo"), Err(Refused::Name { id: "8".to_owned(), name: "demo".to_owned() }));
        other("77", "demo-2").unwrap();
    }

    #[test]
    fn other_files_are_refused() {
        for bad in [
            "agents: {}\n",
            "agents: 5\n",
            "agent:\n  listen: {}\n",
            "- 1\n",
            "text",
            "agents: [",
            "agents: [{id: 1, name: a}]\n",
            "agents:\n  - id: 1\n    name: a\nother: 1\n",
            "agents:\n  - id: 1\n    name: a\n...\n",
        ] {
            assert_eq!(append(bad), Err(Refused::Shape(AGENTS)), "{bad}");
        }
    }

    #[test]
    fn users_are_unique_by_name() {
        let item = "- name: jane\n  tokens:\n    - sha256:ab\n";
        let append = |old: &str| appended(old, &Entry { list: USERS, id: None, name: "jane", item });
        let text = append("# Users.\nusers: []\n").unwrap();
        assert_eq!(text, "# Users.\nusers:\n  - name: jane\n    tokens:\n      - sha256:ab\n");
        assert_eq!(append(&text), Err(Refused::User { name: "jane".to_owned() }));
        assert_eq!(append("agents:\n"), Err(Refused::Shape(USERS)));
        assert!(append("users:\n  - name: joe\n").unwrap().contains("joe"));
    }
}
