//! `kasctl token`: creates tokens for API clients of kas, for agents and for users.

use std::{
    fs::OpenOptions,
    io::{IsTerminal as _, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
    time::Duration,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ids::TokenHash;
use rand::{TryRng as _, rngs::SysRng};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{
    cli::{TokenAgentArgs, TokenApiArgs, TokenUserArgs},
    failure::{Exit, Failure},
    file_error::FileError,
    jwt,
    list_file::{self, Entry},
    output::{Output, note},
    secret::Secret,
    yaml::scalar,
};

/// Prints a token for the API listener.
///
/// # Errors
/// There is no secret, or there are no random bytes.
pub(crate) async fn api(
    output: &mut Output,
    secret_file: Option<&Path>,
    args: &TokenApiArgs,
) -> Result<Exit, Failure> {
    let secret = Secret::load(secret_file)?;
    let token = jwt::mint(secret.bytes(), &args.issuer, args.ttl)?;
    output.write(format!("{token}\n").as_bytes()).await?;
    Ok(Exit::Ok)
}

/// Creates an agent token, and prints its entry in the identity file of kas or adds it to the file.
///
/// # Errors
/// There are no random bytes, the identity file does not permit the entry, or a file exists or cannot be
/// written. The identity file is unchanged then, and there is no new token file.
pub(crate) async fn agent(output: &mut Output, args: &TokenAgentArgs) -> Result<Exit, Failure> {
    let token = random()?;
    let item = identity_item(args, &TokenHash::of(token.as_bytes()));
    let entry = Entry { list: list_file::AGENTS, id: Some(args.id.get()), name: &args.name, item: &item };
    let shown = format!("agent {}, {},", args.id, args.name);
    let files = Files { list: args.agents_file.as_deref(), token: args.token_file.as_deref() };
    hand_out(output, &entry, &shown, &token, files).await
}

/// Creates a token for a user of the Kubernetes API endpoint, as [`agent`] does for an agent.
///
/// # Errors
/// See [`agent`].
pub(crate) async fn user(output: &mut Output, args: &TokenUserArgs) -> Result<Exit, Failure> {
    let token = format!("kasu_{}", random()?);
    let item = user_item(args, process::clock::wall(), &TokenHash::of(token.as_bytes()))?;
    let entry = Entry { list: list_file::USERS, id: None, name: &args.name, item: &item };
    let shown = format!("user {}", args.name);
    let files = Files { list: args.users_file.as_deref(), token: args.token_file.as_deref() };
    hand_out(output, &entry, &shown, &token, files).await
}

/// Returns 256 random bits as text.
fn random() -> Result<String, jwt::Error> {
    let mut random = [0; 32];
    SysRng.try_fill_bytes(&mut random)?;
    Ok(URL_SAFE_NO_PAD.encode(random))
}

/// Where an entry and its token go.
struct Files<'a> {
    /// `None`: the entry is printed.
    list: Option<&'a Path>,
    /// `None`: the token is printed.
    token: Option<&'a Path>,
}

async fn hand_out(
    output: &mut Output,
    entry: &Entry<'_>,
    shown: &str,
    token: &str,
    files: Files<'_>,
) -> Result<Exit, Failure> {
    if let Some(path) = files.list {
        return add(output, entry, shown, path, token, files.token).await;
    }
    if let Some(path) = files.token {
        create(path, token)?;
    }
    let lines: String = entry.item.lines().map(|line| format!("  {line}\n")).collect();
    output.write(lines.as_bytes()).await?;
    if files.token.is_none() {
        let of = entry.list.entry();
        note(format_args!(
            "this is the token of the {of}; it is shown only once, because kas stores only its hash"
        ));
        let _ = writeln!(std::io::stderr(), "{token}");
    }
    Ok(Exit::Ok)
}

/// Prints or stores the token first, and then adds the entry: an entry whose token was lost would block its
/// id and name.
async fn add(
    output: &mut Output,
    entry: &Entry<'_>,
    shown: &str,
    path: &Path,
    token: &str,
    token_file: Option<&Path>,
) -> Result<Exit, Failure> {
    let prepared = list_file::prepare(path, entry)?;
    match token_file {
        Some(file) => create(file, token)?,
        None => {
            // agentk 14.1 sends its token file unchanged, so a line break is added only on a terminal.
            let end = if std::io::stdout().is_terminal() { "\n" } else { "" };
            let written = output.write(format!("{token}{end}").as_bytes()).await;
            written.map_err(|failure| match failure {
                Failure::PipeClosed => Failure::Output(std::io::ErrorKind::BrokenPipe.into()),
                failure => failure,
            })?;
        }
    }
    prepared.commit().inspect_err(|_| {
        if let Some(file) = token_file {
            let _ = std::fs::remove_file(file);
        }
    })?;
    note(format_args!("added {shown} to {}", path.display()));
    Ok(Exit::Ok)
}

/// Writes the token to a new file that only its owner can read. Without a line break, because agentk 14.1
/// sends the file unchanged.
fn create(path: &Path, token: &str) -> Result<(), Failure> {
    let failed = |verb| move |cause| FileError { verb, path: path.to_owned(), cause };
    let mut file =
        OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(failed("create"))?;
    file.write_all(token.as_bytes()).and_then(|()| file.sync_all()).map_err(|cause| {
        // A partial token is useless, and the file would block the next attempt.
        let _ = std::fs::remove_file(path);
        failed("write")(cause).into()
    })
}

/// Returns the list item of an agent as lines without indentation.
fn identity_item(args: &TokenAgentArgs, hash: &TokenHash) -> String {
    format!(
        "- id: {}\n  name: {}\n  project_id: {}\n  tokens:\n    - sha256:{}\n",
        args.id,
        scalar(&args.name),
        args.project,
        hash.to_hex()
    )
}

/// Returns the list item of a user as lines without indentation. `now` is the time since 1970.
fn user_item(args: &TokenUserArgs, now: Duration, hash: &TokenHash) -> Result<String, Failure> {
    let mut item = format!("- name: {}\n", scalar(&args.name));
    if !args.groups.is_empty() {
        let groups: Vec<_> = args.groups.iter().map(|group| scalar(group)).collect();
        item += &format!("  groups: [{}]\n", groups.join(", "));
    }
    if let Some(ttl) = args.expires {
        let seconds = i64::try_from((now + ttl).as_secs()).unwrap_or(i64::MAX);
        let time =
            OffsetDateTime::from_unix_timestamp(seconds).ok().and_then(|time| time.format(&Rfc3339).ok());
        item += &format!("  expires: {}\n", time.ok_or(Failure::TooLate)?);
    }
    Ok(item + &format!("  tokens:\n    - sha256:{}\n", hash.to_hex()))
}

/// Prints the hash of an existing token. `-` reads standard input.
///
/// # Errors
/// The file cannot be read or contains no token.
pub(crate) async fn hash(output: &mut Output, file: &Path) -> Result<Exit, Failure> {
    let mut text = Vec::new();
    let read = if file == Path::new("-") {
        std::io::stdin().read_to_end(&mut text)
    } else {
        std::fs::File::open(file).and_then(|mut file| file.read_to_end(&mut text))
    };
    read.map_err(|cause| FileError { verb: "read", path: file.to_owned(), cause })?;
    let token = text.trim_ascii();
    if token.is_empty() || !token.iter().all(u8::is_ascii_graphic) {
        return Err(Failure::NoToken(file.to_owned()));
    }
    if token.len() < text.len() {
        note(format_args!(
            "{} has white space around the token, for example a newline at its end; the hash is that of the token \
             without it, but agentk of GitLab 14.1 sends the whole file, so remove the white space",
            file.display()
        ));
    }
    output.write(format!("sha256:{}\n", TokenHash::of(token).to_hex()).as_bytes()).await?;
    Ok(Exit::Ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn item(name: &str) -> String {
        let args = TokenAgentArgs {
            id: ids::AgentId::new(1).unwrap(),
            name: name.to_owned(),
            project: 2,
            token_file: None,
            agents_file: None,
        };
        identity_item(&args, &TokenHash::of(b"t"))
    }

    #[test]
    fn identity_item_is_a_yaml_list_item() {
        let hash = TokenHash::of(b"t").to_hex();
        assert_eq!(
            item("demo"),
            format!("- id: 1\n  name: demo\n  project_id: 2\n  tokens:\n    - sha256:{hash}\n")
        );
    }

    #[test]
    fn names_with_another_meaning_in_yaml_are_quoted() {
        for name in ["1", "1e5", "0x1", "true", "no", "null"] {
            assert!(item(name).contains(&format!("name: \"{name}\"\n")), "{name}");
        }
        for name in ["a1", "nothing", "on-call"] {
            assert!(item(name).contains(&format!("name: {name}\n")), "{name}");
        }
    }

    #[test]
    fn a_user_has_only_what_was_given() {
        let args = |groups: &[&str], expires| TokenUserArgs {
            name: "jane@example.com".to_owned(),
            groups: groups.iter().map(|&group| group.to_owned()).collect(),
            expires,
            users_file: None,
            token_file: None,
        };
        let hash = TokenHash::of(b"t");
        let now = Duration::from_secs(1_709_210_096);
        let item = |args| user_item(&args, now, &hash).unwrap();
        let tokens = format!("  tokens:\n    - sha256:{}\n", hash.to_hex());
        assert_eq!(item(args(&[], None)), format!("- name: \"jane@example.com\"\n{tokens}"));
        assert_eq!(
            item(args(&["dev", "a: \"b\", c"], Some(Duration::from_secs(3600)))),
            format!(
                "- name: \"jane@example.com\"\n  groups: [dev, \"a: \\\"b\\\", c\"]\n  expires: 2024-02-29T13:34:56Z\n{tokens}"
            )
        );
        let late = args(&[], Some(Duration::from_secs(1 << 60)));
        assert!(matches!(user_item(&late, now, &hash), Err(Failure::TooLate)));
    }
}
