//! `kasctl token`: creates tokens for API clients of kas and for agents.

use std::{
    fs::OpenOptions,
    io::{IsTerminal as _, Read as _, Write as _},
    os::unix::fs::OpenOptionsExt as _,
    path::Path,
};

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use ids::TokenHash;
use rand::{TryRng as _, rngs::SysRng};

use crate::{
    agents_file::{self, Entry},
    cli::{TokenAgentArgs, TokenApiArgs},
    failure::{Exit, Failure},
    file_error::FileError,
    jwt,
    output::{Output, note},
    secret::Secret,
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
    let mut random = [0; 32];
    SysRng.try_fill_bytes(&mut random).map_err(jwt::Error::from)?;
    let token = URL_SAFE_NO_PAD.encode(random);
    let item = identity_item(args, &TokenHash::of(token.as_bytes()));
    if let Some(path) = &args.agents_file {
        return add(output, args, path, &token, &item).await;
    }
    if let Some(path) = &args.token_file {
        create(path, &token)?;
    }
    let lines: String = item.lines().map(|line| format!("  {line}\n")).collect();
    output.write(lines.as_bytes()).await?;
    if args.token_file.is_none() {
        note("this is the token of the agent; it is shown only once, because kas stores only its hash");
        let _ = writeln!(std::io::stderr(), "{token}");
    }
    Ok(Exit::Ok)
}

/// Prints or stores the token first, and then adds the agent: an agent whose token was lost would block its
/// id and name.
async fn add(
    output: &mut Output,
    args: &TokenAgentArgs,
    path: &Path,
    token: &str,
    item: &str,
) -> Result<Exit, Failure> {
    let entry = Entry { id: args.id.get(), name: &args.name, item };
    let prepared = agents_file::prepare(path, &entry)?;
    match &args.token_file {
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
        if let Some(file) = &args.token_file {
            let _ = std::fs::remove_file(file);
        }
    })?;
    note(format_args!("added agent {}, {}, to {}", args.id, args.name, path.display()));
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

/// Returns the list item as lines without indentation.
fn identity_item(args: &TokenAgentArgs, hash: &TokenHash) -> String {
    let name = &args.name;
    // Without quotes, these are numbers, booleans and null in YAML.
    let quoted = name.starts_with(|c: char| c.is_ascii_digit())
        || ["true", "false", "yes", "no", "on", "off", "y", "n", "null"].contains(&name.as_str());
    let name = if quoted { format!("\"{name}\"") } else { name.clone() };
    format!(
        "- id: {}\n  name: {name}\n  project_id: {}\n  tokens:\n    - sha256:{}\n",
        args.id,
        args.project,
        hash.to_hex()
    )
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
}
