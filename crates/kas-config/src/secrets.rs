//! Reads, compares and checks the secret files that the configuration names.

use std::path::{Path, PathBuf};

use settings::{
    Problem, Problems, Warning,
    secret::{self, ApiSecret, Created, SecretError},
};

use crate::{ApiSecrets, Config, GitLab, Identity, OpenFiles, RedisPasswords, Tracker};

/// The expected mode of a file with a secret or a private key.
pub const EXPECTED_MODE: &str = "mode 0600, or 0640 for a group (`defaultMode: 0440` in a volume of Kubernetes); or \
                                 open_secret_files: warn, where only this process can reach the file anyway";

/// The secrets of the listeners.
#[derive(Debug)]
pub struct Secrets {
    /// The API secrets: any of them verifies. Empty only if none has been created yet.
    pub api: Vec<ApiSecret>,
    /// The secrets of the private API: the first signs and encrypts, any of them verifies and decrypts. Each
    /// has 32 bytes or more, and none is in `api`. Empty without other replicas.
    pub private: Vec<ApiSecret>,
    /// The secret that kas signs requests to GitLab with: 32 bytes. `None`: GitLab is not used. It may be in
    /// `api`.
    pub gitlab: Option<ApiSecret>,
    /// The passwords for Redis; empty without Redis.
    pub redis: RedisPasswords,
    /// The file that has just been created: to be logged, so that its path is known.
    pub created: Option<PathBuf>,
    /// Warnings about the files.
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

    /// Reads and compares the secret files without creating any, to check a configuration.
    ///
    /// If the first start will create the API secret, the result does not contain it.
    ///
    /// # Errors
    /// [`Problems`] with each file that cannot be used, and each secret of replicas that is too short or also
    /// a secret of clients.
    pub fn check_secrets(&self) -> Result<Secrets, Problems> {
        self.secrets(false)
    }

    /// Reads and compares the secret files, and creates the API secret if no file is configured.
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
                            "a different secret: otherwise every client of the API could act as a replica",
                        ));
                    }
                    if gitlab.as_ref() == Some(secret) {
                        return Some((
                            "the same secret as in gitlab".to_owned(),
                            "a different secret: otherwise GitLab could act as a replica",
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

/// How problems name the secret files of a listener.
struct Keys {
    section: &'static str,
    /// Whether the list contains the first file too, because the key for a single file is not given.
    all_listed: bool,
    open: OpenFiles,
}

impl Keys {
    /// Reads files in their order; repeated secrets are left out.
    ///
    /// `fault` returns what is wrong with a secret that could be read: what was found, what is expected.
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

/// Reports what is wrong with a secret that could be read.
fn judge(
    key: &str,
    open: OpenFiles,
    secret: &ApiSecret,
    problems: &mut Vec<Problem>,
    warnings: &mut Vec<Warning>,
) {
    let mut warn = |warning: Warning| {
        // Several keys may name the same file.
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
