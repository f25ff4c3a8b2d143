//! The secrets that the configuration names: reading, comparing and judging their files.

use std::path::{Path, PathBuf};

use settings::{
    Problem, Problems, Warning,
    secret::{self, ApiSecret, Created, SecretError},
};

use crate::{ApiSecrets, Config, GitLab, Identity, OpenFiles, RedisPasswords, Tracker};

/// What would be right instead of a secret or a private key that others can read.
pub const EXPECTED_MODE: &str = "mode 0600, or 0640 for a group (`defaultMode: 0440` in a volume of Kubernetes); or \
                                 open_secret_files: warn, where only this process can reach the file anyway";

/// The secrets of the listeners, read.
#[derive(Debug)]
pub struct Secrets {
    /// The API secrets: any of them verifies. Empty only when none has been made yet.
    pub api: Vec<ApiSecret>,
    /// The secrets of the private API: the first signs and seals, any of them verifies and opens. Each
    /// has 32 bytes or more, and none is one of `api`. Empty without other replicas.
    pub private: Vec<ApiSecret>,
    /// What kas signs with towards GitLab: 32 bytes. `None`: GitLab is not asked. It may be one of `api`.
    pub gitlab: Option<ApiSecret>,
    /// What is shown to Redis; empty without it.
    pub redis: RedisPasswords,
    /// The file that has just been made: to be logged, so that its place is known.
    pub created: Option<PathBuf>,
    /// What is odd about their files.
    pub warnings: Vec<Warning>,
}

impl Config {
    /// Returns the files of all secrets that are used.
    pub fn secret_files(&self) -> Vec<PathBuf> {
        let mut files = match &self.api.secrets {
            ApiSecrets::Made(path) => vec![path.clone()],
            ApiSecrets::Given(paths) => paths.clone(),
        };
        if let Some(private) = self.tracker.private_api() {
            files.extend(private.secrets.iter().cloned());
        }
        if let Identity::GitLab(gitlab) = &self.identity {
            files.push(gitlab.secret.clone());
        }
        files
    }

    /// Reads and compares the secret files without making any: for checking a configuration.
    ///
    /// The API secret that the first start will make is missing from the answer then.
    ///
    /// # Errors
    /// [`Problems`] with each file that cannot be used, each secret of replicas that is too short, and
    /// each that clients have too.
    pub fn check_secrets(&self) -> Result<Secrets, Problems> {
        self.secrets(false)
    }

    /// Reads and compares the secret files, and makes the API secret if it was left to kas.
    ///
    /// # Errors
    /// As [`Config::check_secrets`].
    pub fn load_secrets(&self) -> Result<Secrets, Problems> {
        self.secrets(true)
    }

    fn secrets(&self, make: bool) -> Result<Secrets, Problems> {
        let mut problems = Vec::new();
        let mut warnings = Vec::new();
        let mut created = None;
        let open = self.open_secret_files;
        let api = Keys { section: "api", all_listed: self.api.all_secrets_listed, open };
        let api_secrets = match &self.api.secrets {
            ApiSecrets::Made(path) => {
                let made = match ApiSecret::read(path) {
                    Err(error) if error.is_absent() && make => secret::load_or_create(path).map(Some),
                    Err(error) if error.is_absent() => Ok(None),
                    read => read.map(|secret| Some((secret, Created::No))),
                };
                let made = made.unwrap_or_else(|error| {
                    problems.push(api.unusable(0, &error));
                    None
                });
                made.into_iter()
                    .map(|(secret, made)| {
                        created = (made == Created::Yes).then(|| path.clone());
                        api.judge(0, &secret, &mut problems, &mut warnings);
                        secret
                    })
                    .collect()
            }
            ApiSecrets::Given(paths) => api.read(paths, &mut problems, &mut warnings, |_, _| None),
        };
        let gitlab = match &self.identity {
            Identity::File { .. } => None,
            Identity::GitLab(gitlab) => gitlab.read_secret(open, &mut problems, &mut warnings),
        };
        let redis = match &self.tracker {
            Tracker::Redis(shared) => shared.redis.read_passwords().unwrap_or_else(|found| {
                problems.extend(found.iter().cloned());
                RedisPasswords::default()
            }),
            _ => RedisPasswords::default(),
        };
        let private = match self.tracker.private_api() {
            None => Vec::new(),
            Some(private) => {
                let keys = Keys { section: "private_api", all_listed: private.all_secrets_listed, open };
                keys.read(&private.secrets, &mut problems, &mut warnings, |secret, _| {
                    if api_secrets.contains(secret) {
                        return Some((
                            "the same secret as in api.listen".to_owned(),
                            "a secret of its own: otherwise every client of the API could act as a replica",
                        ));
                    }
                    if gitlab.as_ref() == Some(secret) {
                        return Some((
                            "the same secret as in gitlab".to_owned(),
                            "a secret of its own: otherwise GitLab could act as a replica",
                        ));
                    }
                    None
                })
            }
        };
        match Problems::new(problems) {
            Some(problems) => Err(problems),
            None => Ok(Secrets { api: api_secrets, private, gitlab, redis, created, warnings }),
        }
    }
}

impl GitLab {
    fn read_secret(
        &self,
        open: OpenFiles,
        problems: &mut Vec<Problem>,
        warnings: &mut Vec<Warning>,
    ) -> Option<ApiSecret> {
        const KEY: &str = "gitlab.authentication_secret_file";
        let (found, expected) = match ApiSecret::read(&self.secret) {
            Err(error) => (error.found(), error.expected()),
            Ok(secret) if secret.expose().len() != secret::BYTES => (
                format!("a secret of {} bytes ({})", secret.expose().len(), self.secret.display()),
                "base64 of exactly 32 bytes: the same file as GitLab has, where it is called .gitlab_kas_secret",
            ),
            Ok(secret) => {
                judge(KEY, open, &secret, problems, warnings);
                return Some(secret);
            }
        };
        problems.push(Problem::rule(KEY, found, expected));
        None
    }
}

/// How the secret files of a listener are named in problems.
struct Keys {
    section: &'static str,
    /// Whether the first of them stands in the list too, because the key for one file is not given.
    all_listed: bool,
    open: OpenFiles,
}

impl Keys {
    /// Reads files in their order; a secret that comes again is left out.
    ///
    /// `fault` says what is wrong with a secret that could be read: what was found, what is expected.
    fn read(
        &self,
        paths: &[PathBuf],
        problems: &mut Vec<Problem>,
        warnings: &mut Vec<Warning>,
        fault: impl Fn(&ApiSecret, &Path) -> Option<(String, &'static str)>,
    ) -> Vec<ApiSecret> {
        let mut secrets = Vec::new();
        for (i, path) in paths.iter().enumerate() {
            let secret = match ApiSecret::read(path) {
                Ok(secret) => secret,
                Err(error) => {
                    problems.push(self.unusable(i, &error));
                    continue;
                }
            };
            if let Some((found, expected)) = fault(&secret, path) {
                problems.push(self.problem(i, found, expected));
            }
            self.judge(i, &secret, problems, warnings);
            if !secrets.contains(&secret) {
                secrets.push(secret);
            }
        }
        secrets
    }

    fn unusable(&self, position: usize, error: &SecretError) -> Problem {
        self.problem(position, error.found(), error.expected())
    }

    fn judge(
        &self,
        position: usize,
        secret: &ApiSecret,
        problems: &mut Vec<Problem>,
        warnings: &mut Vec<Warning>,
    ) {
        judge(&self.key(position), self.open, secret, problems, warnings);
    }

    fn key(&self, position: usize) -> String {
        let section = self.section;
        let key = match (self.all_listed, position) {
            (true, i) => format!("authentication_secret_files[{i}]"),
            (false, 0) => "authentication_secret_file".to_owned(),
            (false, i) => format!("authentication_secret_files[{}]", i - 1),
        };
        format!("{section}.listen.{key}")
    }

    fn problem(&self, position: usize, found: String, expected: &str) -> Problem {
        Problem::rule(self.key(position), found, expected)
    }
}

/// Says what is wrong with a secret that could be read.
fn judge(
    key: &str,
    open: OpenFiles,
    secret: &ApiSecret,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Warning>,
) {
    let mut warn = |warning: Warning| {
        // One file may stand for several keys.
        if !warnings.contains(&warning) {
            warnings.push(warning);
        }
    };
    secret.warnings().cloned().for_each(&mut warn);
    for fault in secret.faults() {
        if fault.is_open && open == OpenFiles::Warn {
            warn(Warning { path: key.to_owned(), text: fault.found.clone() });
        } else {
            let expected = if fault.is_open { EXPECTED_MODE } else { fault.expected };
            problems.push(Problem::rule(key, &fault.found, expected));
        }
    }
}
