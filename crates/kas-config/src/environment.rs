//! The environment variables that the configuration depends on.

use std::{ffi::OsString, path::PathBuf};

/// The environment variables that the configuration depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Environment {
    /// `KAS_STATE_DIR`.
    pub kas_state_dir: Option<OsString>,
    /// `XDG_STATE_HOME`.
    pub xdg_state_home: Option<OsString>,
    /// `HOME`.
    pub home: Option<OsString>,
    /// `OWN_PRIVATE_API_URL`: where other replicas reach this one, as in 14.1.
    pub own_private_api_url: Option<OsString>,
    /// `POD_IP`, which a pod gets from the field `status.podIP`.
    pub pod_ip: Option<OsString>,
    /// OpenTelemetry's own variables.
    pub otlp: traces::Variables,
}

impl Environment {
    /// Reads the environment of this process.
    pub fn of_process() -> Self {
        Self {
            kas_state_dir: std::env::var_os("KAS_STATE_DIR"),
            xdg_state_home: std::env::var_os("XDG_STATE_HOME"),
            home: std::env::var_os("HOME"),
            own_private_api_url: std::env::var_os("OWN_PRIVATE_API_URL"),
            pod_ip: std::env::var_os("POD_IP"),
            otlp: traces::Variables::of_process(),
        }
    }

    /// Returns the state folder to use when the file names none, if the environment determines one.
    pub(crate) fn state_dir(&self) -> Option<PathBuf> {
        let set = |value: &Option<OsString>| value.clone().filter(|v| !v.is_empty()).map(PathBuf::from);
        set(&self.kas_state_dir)
            // The XDG specification says that a relative path is to be ignored.
            .or_else(|| set(&self.xdg_state_home).filter(|p| p.is_absolute()).map(|p| p.join("kas")))
            .or_else(|| set(&self.home).map(|p| p.join(".local/state/kas")))
    }
}
