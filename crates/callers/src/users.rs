//! Callers that are listed in a file, by the hashes of their tokens.
//!
//! As in the list of agents, a file with any problem is refused as a whole, a change takes effect within half
//! a second, and the last valid list stays in use if a file becomes invalid or is deleted (see
//! [`process::reload`]). To revoke a user, remove it from the file: its open requests end then. When its
//! tokens expire, only new requests are refused.

use std::{
    collections::{HashMap, hash_map},
    fmt, io,
    net::IpAddr,
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use identity::{IfAbsent, TokenHolders};
use ids::{AgentId, TokenHash, check_identity_name, check_identity_value};
use process::reload::{self, Content, MakeFile, ReloadedFile};
use settings::{
    Problems,
    secret::create_private,
    walk::{self, Section, Unknown},
    yaml,
};
use time::{OffsetDateTime, format_description::well_known::Rfc3339};

use crate::{AuthError, Caller, Changes, Credential, Form, Grant, Hold, Reach, Source, SourceKind};

/// The beginning of the names and groups of this source.
const PREFIX: &str = ids::FILE_USER_PREFIX;
/// The most tokens of a user: two while one replaces the other. Without one, the user is locked out.
const MOST_TOKENS: usize = 2;
/// The most groups of a user. A larger number would not fit into the headers of a request.
const MOST_GROUPS: usize = 64;

const NAME_RULE: &str = "at most 1020 bytes without control characters and without white space at an end";
const EXPIRES_RULE: &str = "a time in RFC 3339 such as 2030-01-31T12:00:00Z, or no such key";

/// All users of one version of the file. Immutable.
#[derive(Default)]
pub struct UserList {
    by_token: HashMap<TokenHash, Arc<User>>,
    users: usize,
}

struct User {
    /// With the prefix.
    name: Arc<str>,
    /// With the prefix.
    groups: Arc<[String]>,
    uid: Option<Arc<str>>,
    extra: Arc<[(String, Vec<String>)]>,
    /// Seconds since 1970-01-01 00:00 UTC at which its tokens expire.
    expires: Option<i64>,
}

impl UserList {
    /// Parses a users file.
    ///
    /// # Errors
    /// [`Problems`] with everything that is wrong. A file without the key `users` is refused, so that a file
    /// that was just truncated does not mean "no users".
    pub fn parse(file: &[u8]) -> Result<Self, Problems> {
        let text = std::str::from_utf8(file).map_err(|_| yaml::not_utf8())?;
        let root = yaml::parse(text, yaml::Size::Large)?;
        let (list, report) = walk::walk(&root, Unknown::Fails, |root| {
            let has_key = root.is_declared("users");
            if !has_key {
                root.refuse("users", "the key `users:` with a list, which may be empty");
            }
            users(root)
        });
        match Problems::new(report.problems) {
            Some(problems) => Err(problems),
            None => Ok(list),
        }
    }

    /// Returns the number of users.
    pub fn len(&self) -> usize {
        self.users
    }

    /// Whether there are no users.
    pub fn is_empty(&self) -> bool {
        self.users == 0
    }

    fn lookup(&self, token: TokenHash) -> Result<&User, AuthError> {
        // The keys of the map are hashes, whose comparison takes constant time. The time of the lookup
        // depends only on a hash, from which no token can be derived.
        self.by_token.get(&token).map(|user| &**user).ok_or(AuthError::Unknown)
    }
}

impl fmt::Debug for UserList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("UserList").field("users", &self.users).finish_non_exhaustive()
    }
}

impl Content for UserList {
    type Error = Problems;
    const NAME: &'static str = "users file";
    const RISK: &'static str = "add users";

    fn parse(file: &[u8]) -> Result<Self, Problems> {
        Self::parse(file)
    }

    fn entries(&self) -> usize {
        self.users
    }
}

fn users(root: &mut Section<'_, '_>) -> UserList {
    let mut by_name = HashMap::new();
    let mut holders = TokenHolders::new("users", "user");
    let mut by_token = HashMap::new();
    let list = root.items("users", "", |s, i| {
        let name = s.required("name", "", NAME_RULE, "");
        if !name.is_empty() {
            match by_name.entry(name.clone()) {
                hash_map::Entry::Vacant(free) => drop(free.insert(i)),
                hash_map::Entry::Occupied(other) => {
                    s.refuse("name", format!("a name that users[{}] does not have", other.get()));
                }
            }
            if !is_name(&name) {
                s.refuse("name", NAME_RULE);
            }
        }
        let groups = s.texts("groups", &[], "");
        if groups.len() > MOST_GROUPS {
            let found = format!("{} groups", groups.len());
            s.refuse_as("groups", found, format!("at most {MOST_GROUPS} groups"));
        }
        for (n, group) in groups.iter().enumerate().filter(|(_, group)| !is_name(group)) {
            s.refuse_as(&format!("groups[{n}]"), settings::show::shown_text(group), NAME_RULE);
        }
        let uid = s.optional_text("uid", "", "");
        if uid.as_deref().is_some_and(|uid| check_identity_value(uid).is_err()) {
            s.refuse(
                "uid",
                "at most 1024 bytes without control characters and without white space at an end",
            );
        }
        let expires = s.optional_text("expires", "", "").and_then(|text| {
            let time = OffsetDateTime::parse(&text, &Rfc3339).ok();
            if time.is_none() {
                s.refuse("expires", EXPIRES_RULE);
            }
            time.map(OffsetDateTime::unix_timestamp)
        });
        let tokens = holders.read(s, i, 0..=MOST_TOKENS);
        let access_type = vec![SourceKind::File.access_type().to_owned()];
        let user = Arc::new(User {
            name: prefixed(&name).into(),
            groups: groups.iter().map(|group| prefixed(group)).collect(),
            uid: uid.map(Into::into),
            extra: Arc::new([
                ("agent.gitlab.com/username".to_owned(), vec![name]),
                ("agent.gitlab.com/access_type".to_owned(), access_type),
            ]),
            expires,
        });
        by_token.extend(tokens.into_iter().map(|token| (token, Arc::clone(&user))));
    });
    UserList { by_token, users: list.len() }
}

fn prefixed(name: &str) -> String {
    format!("{PREFIX}{name}")
}

/// Whether a name or group is valid, alone and with its prefix.
fn is_name(name: &str) -> bool {
    check_identity_value(name).is_ok() && check_identity_name(&prefixed(name)).is_ok()
}

/// Why a users file cannot be used at the start. kas does not start then.
#[derive(Debug, thiserror::Error)]
pub enum OpenUsersError {
    /// The file cannot be read. It was not changed.
    #[error(
        "cannot read the users file {path}; set agent.kubernetes_api.users.file to a file that this process may read"
    )]
    Read {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is absent and cannot be created.
    #[error("cannot create the users file {path}; set a state_dir that this process may write")]
    Make {
        /// The file.
        path: PathBuf,
        /// The error of the system.
        source: io::Error,
    },
    /// The file is not a valid list of users.
    #[error("the users file {path} is not valid")]
    Invalid {
        /// The file.
        path: PathBuf,
        /// The problems.
        source: Problems,
    },
}

/// The users of a file, which is reloaded when it changes. Dropping it stops the watcher.
#[derive(Debug)]
pub struct FileUsers(ReloadedFile<UserList>);

impl FileUsers {
    /// Reads the file and watches it from then on. Changes are reported by `changes`.
    ///
    /// # Errors
    /// [`OpenUsersError`] if there is no valid file. Later problems are only logged, see the module.
    pub async fn open(path: &Path, if_absent: IfAbsent, changes: &Changes) -> Result<Self, OpenUsersError> {
        let make = (if_absent == IfAbsent::Make).then(|| -> MakeFile {
            let (file, text) = (path.to_owned(), template(path));
            Box::new(move || create_private(&file, text.as_bytes()).map(drop))
        });
        let opened = ReloadedFile::open(path, make, changes.sender()).await;
        let path = || path.to_owned();
        opened.map(Self).map_err(|error| match error {
            reload::OpenError::Make(source) => OpenUsersError::Make { path: path(), source },
            reload::OpenError::Read(source) => OpenUsersError::Read { path: path(), source },
            reload::OpenError::Invalid(source) => OpenUsersError::Invalid { path: path(), source },
        })
    }

    /// Returns the current users.
    pub fn current(&self) -> Arc<UserList> {
        self.0.current()
    }

    fn identify(&self, credential: &Credential) -> Result<Caller, AuthError> {
        let token = credential.bearer().ok_or(AuthError::Unknown)?;
        let hash = TokenHash::of(token.secret().as_bytes());
        let list = self.0.load();
        let user = list.lookup(hash)?;
        if user.expires.is_some_and(|expires| now() >= expires) {
            tracing::debug!(user = &*user.name, "the tokens of a user have expired");
            return Err(AuthError::Unknown);
        }
        Ok(user.caller(hash))
    }
}

/// Returns the seconds since 1970-01-01 00:00 UTC.
fn now() -> i64 {
    i64::try_from(process::clock::wall().as_secs()).unwrap_or(i64::MAX)
}

impl User {
    fn caller(&self, token: TokenHash) -> Caller {
        Caller {
            source: SourceKind::File,
            name: Arc::clone(&self.name),
            uid: self.uid.clone(),
            groups: Arc::clone(&self.groups),
            extra: Arc::clone(&self.extra),
            gitlab_user: None,
            grant: Grant::Rules,
            recheck_at: None,
            hold: Hold::new(Arc::new(token)),
        }
    }
}

#[async_trait]
impl Source for FileUsers {
    fn kind(&self) -> SourceKind {
        SourceKind::File
    }

    fn accepts(&self, credential: &Credential) -> bool {
        credential.bearer().is_some_and(|bearer| bearer.form() == Form::User)
    }

    async fn authenticate(
        &self,
        credential: &Credential,
        _agent: AgentId,
        _from: Option<IpAddr>,
    ) -> Result<Caller, AuthError> {
        self.identify(credential)
    }

    async fn recheck(&self, caller: &Caller, _agent: AgentId) -> Result<Caller, AuthError> {
        let hash = *caller.hold.state::<TokenHash>().ok_or(AuthError::Unknown)?;
        let list = self.0.load();
        let user = list.lookup(hash)?;
        // A token that has moved to another user is no longer that of this caller.
        if user.name == caller.name { Ok(user.caller(hash)) } else { Err(AuthError::Unknown) }
    }

    async fn reach(&self, credential: &Credential, _from: Option<IpAddr>) -> Result<Reach, AuthError> {
        self.identify(credential).map(Reach::Rules)
    }
}

/// Returns the content of a new file. Its last line is the key, so that appending an entry makes a valid
/// file.
fn template(path: &Path) -> String {
    format!(
        "\
# The users of the Kubernetes API endpoint of kas. Changes take effect within half a second, without a
# restart.
#
# To add a user; the command writes the token to a new file, and only its hash to this one:
#
#   kasctl token user --name jane --group dev --users-file {} --token-file jane.token
#
# An entry looks like this. Only `name` is required. A second token is for the time in which tokens are
# rotated. For access rules and clusters, names and groups begin with `kas:`, as in kas:jane and kas:dev.
#
#   - name: jane
#     groups: [dev]
#     uid: \"1000\"
#     expires: 2030-01-31T12:00:00Z
#     tokens:
#       - sha256:<64 hexadecimal digits: the SHA-256 of the token>
#
# To revoke a user, remove its entry: its open requests end. Deleting this file revokes nothing.
users:
",
        path.display()
    )
}

#[cfg(test)]
mod tests;
