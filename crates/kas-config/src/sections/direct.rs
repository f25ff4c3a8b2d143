//! Section `direct`.

use std::path::PathBuf;

use settings::walk::Section;

use super::{
    listen::{Listen, bind_address, tls},
    tracker::Tracker,
};

/// Section `direct`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Direct {
    /// Where to listen.
    pub listen: Listen,
    /// The file with the secret of proxies.
    pub secret: PathBuf,
}

/// Declares the section. Returns `None` if the file does not have it.
pub(super) fn read(root: &mut Section<'_, '_>, tracker: &Tracker) -> Option<Direct> {
    let is_on = root.has("direct");
    let doc = "A listener that tells proxies which replica holds an agent. Without this section, it is off. It pays \
               from five replicas on: see docs/direct.md. Give all replicas the same section.";
    let section = root.optional(None, |root| root.section("direct", doc, section));
    if is_on && *tracker == Tracker::Memory && !root.is_refused("direct") {
        root.refuse_as(
            "direct",
            "a section, although there is one replica (tracker: memory)",
            "several replicas: only then there is something to tell",
        );
    }
    is_on.then_some(section)
}

fn section(s: &mut Section<'_, '_>) -> Direct {
    let listen = s.section("listen", "Its listener: for proxies only.", |s| {
        let (network, address) = bind_address(s, "0.0.0.0:8157");
        Listen { network, address, tls: tls(s) }
    });
    let secret = s.required_path(
        "authentication_secret_file",
        "/etc/kas/direct-secret",
        "The file with the secret of proxies: a line of at least 16 characters. They send it to this listener as \
         kas-authorization: Bearer <secret>, and to the Kubernetes API endpoint as kas-accel: <secret>.",
    );
    Direct { listen, secret }
}
