//! [`Limits`]: how much is kept, and for how long.

use std::time::Duration;

const HOUR: Duration = Duration::from_secs(3_600);
const MIB: usize = 1 << 20;

/// How much is kept, and for how long.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Messages of one agent that wait. More are refused.
    pub agent_messages: usize,
    /// Their bytes. A larger one waits alone.
    pub agent_bytes: usize,
    /// Bytes of all messages that wait at a replica, copies included. More are refused. Messages that another
    /// replica has accepted are taken up to twice as many: they are promised already.
    pub bytes: usize,
    /// Bytes of dead letters. The oldest go.
    pub dead_bytes: usize,
    /// Records of messages that are over. The oldest go.
    pub over: usize,
    /// How long delivery is tried.
    pub wait: Duration,
    /// How long a dead letter is kept.
    pub dead: Duration,
    /// How long it is remembered that a message is over.
    pub remembered: Duration,
    /// How long definitions are kept that nobody confirms.
    pub definitions: Duration,
    /// Agents with definitions.
    pub definition_agents: usize,
    /// Bytes of all definitions.
    pub definition_bytes: usize,
    /// Deliveries to an agent at once.
    pub deliveries: usize,
    /// The first pause after a failed delivery is at most this long, and each further one at most twice as
    /// long…
    pub first_pause: Duration,
    /// …up to this.
    pub longest_pause: Duration,
    /// How often everything is asked again.
    pub check: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            agent_messages: 1_000,
            agent_bytes: 8 * MIB,
            bytes: 64 * MIB,
            dead_bytes: 16 * MIB,
            over: 100_000,
            wait: 24 * HOUR,
            dead: 7 * 24 * HOUR,
            remembered: 24 * HOUR,
            definitions: 7 * 24 * HOUR,
            definition_agents: 20_000,
            definition_bytes: 64 * MIB,
            deliveries: 4,
            first_pause: Duration::from_secs(1),
            longest_pause: Duration::from_secs(300),
            check: Duration::from_secs(30),
        }
    }
}
