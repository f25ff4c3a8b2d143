//! Section `hooks`.

use std::path::PathBuf;

use settings::walk::Section;

use super::listen::{Listen, bind_address, tls};

/// Section `hooks`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hooks {
    /// Where to listen.
    pub listen: Listen,
    /// The largest body, in bytes.
    pub body: u32,
    /// The folder of the secrets of hooks; `None`: only hooks whose receiver checks can be used.
    pub secrets: Option<PathBuf>,
}

/// The default of the largest body, and the most that it may be, in bytes.
const BODY: (u32, u32) = (1 << 20, 25 << 20);

/// Declares the section. Returns `None` if the file does not have it.
pub(super) fn read(root: &mut Section<'_, '_>) -> Option<Hooks> {
    let is_on = root.has("hooks");
    let doc = "A listener for webhooks into the clusters of agents. Without this section, it is off. The hooks of an \
               agent are in kas.yaml beside its configuration. Give all replicas the same section.";
    let section = root.optional(None, |root| root.section("hooks", doc, section));
    is_on.then_some(section)
}

fn section(s: &mut Section<'_, '_>) -> Hooks {
    let listen = s.section("listen", "Its listener.", |s| {
        let (network, address) = bind_address(s, "0.0.0.0:8156");
        Listen { network, address, tls: tls(s) }
    });
    let body = s.number_within("body", BODY.0, 1..=BODY.1, "The largest body of a hook, in bytes.");
    let secrets = s.path(
        "secrets_dir",
        "The folder of the secrets of hooks: secrets_dir/<agent>/<name> is the secret that kas.yaml of the agent calls \
         <name>, such as secrets_dir/7/push. It is read whenever a hook comes.",
    );
    Hooks { listen, body, secrets }
}
