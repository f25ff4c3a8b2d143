//! `kasctl diff`: what a sync of a manifest project would change.

use std::{
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use bytes::Bytes;
use process::clock;
use proto::kas::api::v1::{
    DiffChange, DiffRequest, DiffResponse,
    diff_request::{File, Files, Of},
};
use serde::Serialize;

use crate::{
    api::{self, Client},
    cli::{DiffArgs, Format, Global},
    diff_at,
    explain::CallKind,
    failure::{Exit, Failure},
    file_error::FileError,
    gitops::object_name,
    output::{Output, note},
    table::printable,
};

/// How long a diff may take. kas itself allows 120 s.
const TIMEOUT: Duration = Duration::from_secs(130);
/// The most bytes of files.
const MOST_BYTES: u64 = 20 << 20;
/// The most files.
const MOST_FILES: usize = 10_000;
/// The deepest folder.
const DEEPEST: usize = 64;
/// The names of files that are sent end with one of these.
const ENDINGS: [&str; 3] = ["yaml", "yml", "json"];

/// Prints a diff. The exit codes are those of `kubectl diff`: 0 without changes, 1 with changes, above that
/// with errors.
///
/// # Errors
/// The files cannot be read, or there is no diff.
pub(crate) async fn run(global: Global, output: Output, args: DiffArgs) -> Result<Exit, Failure> {
    match Box::pin(diff(global, output, args)).await {
        // 1 means that there are changes.
        Err(failure) if failure.exit() == Exit::Failure => {
            note(&failure);
            Ok(Exit::Usage)
        }
        done => done,
    }
}

async fn diff(global: Global, output: Output, args: DiffArgs) -> Result<Exit, Failure> {
    let format = global.output;
    // Files are read before kas is called.
    let files = args.path.as_deref().map(read).transpose()?;
    if let (Some(url), Some(files)) = (&args.at.url, &files) {
        let limit = global.timeout.unwrap_or(TIMEOUT);
        let token = args.at.source().token(Some(args.agent), clock::wall()).await?;
        let of = (args.agent, args.project.as_str());
        let answer = diff_at::fetch(url, &global.tls(), &token, of, files, limit).await?;
        return print(output, &answer, format).await;
    }
    api::with_client(global.settings(), async |client| {
        Box::pin(ask(client, output, args, files, format)).await
    })
    .await
}

async fn ask(
    client: Client,
    output: Output,
    args: DiffArgs,
    files: Option<Files>,
    format: Format,
) -> Result<Exit, Failure> {
    let of = match (files, args.reference, args.live) {
        (Some(files), ..) => Of::Files(files),
        (None, Some(name), _) => Of::Ref(name),
        (None, None, _) => Of::Live(true),
    };
    let call = client.call(CallKind::Kas, Some(TIMEOUT));
    let question = DiffRequest { agent_id: args.agent.get(), project: args.project, of: Some(of) };
    let request = client.request(&call, question)?;
    let answer = client
        .within(&call, async {
            let answer = client.kas().diff(request).await;
            Ok(answer.map_err(|status| client.explain(&call, &status))?.into_inner())
        })
        .await?;
    print(output, &answer, format).await
}

/// Prints the changes.
async fn print(mut output: Output, answer: &DiffResponse, format: Format) -> Result<Exit, Failure> {
    for warning in &answer.warnings {
        note(format_args!("warning: {}", printable(warning)));
    }
    match format {
        Format::Table => output.write(text(answer).as_bytes()).await?,
        Format::Json => {
            for change in &answer.changes {
                output.json_line(&ChangeJson::from(change)).await?;
            }
        }
    }
    Ok(exit(answer))
}

fn exit(answer: &DiffResponse) -> Exit {
    let has = |action: &str| answer.changes.iter().any(|change| change.action == action);
    if has("error") {
        Exit::Usage
    } else if answer.changes.iter().any(|change| change.action != "keep") {
        Exit::Failure
    } else {
        Exit::Ok
    }
}

/// Returns the unified diff of all changes. A line that begins with `#` says what is done to an object.
fn text(answer: &DiffResponse) -> String {
    let mut text = String::new();
    for change in &answer.changes {
        let DiffChange { action, group, kind, namespace, name, file, diff, error } = change;
        let object = object_name(group, kind, namespace, name);
        text.push_str(&printable(&format!("# {action} {object}")));
        if !file.is_empty() {
            text.push_str(&printable(&format!(" ({file})")));
        }
        if !error.is_empty() {
            text.push_str(&printable(&format!(": {error}")));
        }
        text.push('\n');
        for line in diff.lines() {
            // A tab is the only control character of a diff.
            let parts: Vec<String> = line.split('\t').map(printable).collect();
            text.push_str(&parts.join("\t"));
            text.push('\n');
        }
    }
    text
}

/// One line of `-o json`. Field names are stable.
#[derive(Serialize)]
struct ChangeJson<'a> {
    action: &'a str,
    object: ObjectJson<'a>,
    /// Null: the object is no longer in the set.
    file: Option<&'a str>,
    diff: &'a str,
    error: &'a str,
}

#[derive(Serialize)]
struct ObjectJson<'a> {
    group: &'a str,
    kind: &'a str,
    namespace: &'a str,
    name: &'a str,
}

impl<'a> From<&'a DiffChange> for ChangeJson<'a> {
    fn from(change: &'a DiffChange) -> Self {
        let DiffChange { action, group, kind, namespace, name, file, diff, error } = change;
        let file = Some(file.as_str()).filter(|file| !file.is_empty());
        Self { action, object: ObjectJson { group, kind, namespace, name }, file, diff, error }
    }
}

/// Reads the manifests below a folder. Symbolic links are not followed.
///
/// # Errors
/// A file cannot be read, or there are too many or too large ones.
fn read(folder: &Path) -> Result<Files, Failure> {
    let mut found = Vec::new();
    let mut size = 0;
    let mut open = vec![(folder.to_owned(), 0)];
    while let Some((path, depth)) = open.pop() {
        let failed = |cause: io::Error| Failure::File(FileError { verb: "read", path: path.clone(), cause });
        for entry in std::fs::read_dir(&path).map_err(failed)? {
            let entry = entry.map_err(failed)?;
            let kind = entry.file_type().map_err(failed)?;
            let is_hidden = entry.file_name().to_string_lossy().starts_with('.');
            if kind.is_dir() && !is_hidden && depth < DEEPEST {
                open.push((entry.path(), depth + 1));
            } else if kind.is_file() && is_manifest(&entry.path()) {
                size += entry.metadata().map_err(failed)?.len();
                found.push(entry.path());
            }
            if size > MOST_BYTES || found.len() > MOST_FILES {
                return Err(Failure::Usage("--path has more than 20 MiB or 10,000 files of manifests"));
            }
        }
    }
    found.sort();
    let files = found.into_iter().map(|path| file(folder, path)).collect::<Result<_, _>>()?;
    Ok(Files { files })
}

fn is_manifest(path: &Path) -> bool {
    path.extension().is_some_and(|extension| ENDINGS.iter().any(|ending| extension == *ending))
}

fn file(folder: &Path, path: PathBuf) -> Result<File, Failure> {
    let content = std::fs::read(&path)
        .map_err(|cause| Failure::File(FileError { verb: "read", path: path.clone(), cause }))?;
    let name = path.strip_prefix(folder).unwrap_or(&path).to_string_lossy().into_owned();
    Ok(File { path: name, content: Bytes::from(content) })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn change(action: &str) -> DiffChange {
        DiffChange {
            action: action.into(),
            kind: "ConfigMap".into(),
            name: "a".into(),
            ..DiffChange::default()
        }
    }

    #[test]
    fn exit_codes_are_those_of_kubectl_diff() {
        let of = |actions: &[&str]| {
            exit(&DiffResponse {
                changes: actions.iter().map(|a| change(a)).collect(),
                ..DiffResponse::default()
            })
        };
        assert_eq!(of(&[]), Exit::Ok);
        assert_eq!(of(&["keep"]), Exit::Ok);
        assert_eq!(of(&["update", "keep"]), Exit::Failure);
        assert_eq!(of(&["update", "error"]), Exit::Usage);
    }

    #[test]
    fn control_characters_of_a_cluster_are_escaped() {
        let mut hostile = change("update");
        hostile.diff = "-\ta\u{1b}[2J\n+\tb\n".into();
        let answer = DiffResponse { changes: vec![hostile], ..DiffResponse::default() };
        assert_eq!(text(&answer), "# update ConfigMap a\n-\ta\\u{1b}[2J\n+\tb\n");
    }

    #[test]
    fn manifests_are_read_with_their_paths() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(dir.path().join("b/.git")).unwrap();
        std::fs::write(dir.path().join("b/x.yaml"), "x").unwrap();
        std::fs::write(dir.path().join("b/.git/y.yaml"), "y").unwrap();
        std::fs::write(dir.path().join("a.json"), "a").unwrap();
        std::fs::write(dir.path().join("README.md"), "r").unwrap();
        let files = read(dir.path()).unwrap().files;
        let names: Vec<&str> = files.iter().map(|file| file.path.as_str()).collect();
        assert_eq!(names, ["a.json", "b/x.yaml"]);
    }
}
