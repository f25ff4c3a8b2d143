//! Datagrams of a sender without the key of gossip, made of those that were seen.

use anyhow::{Context as _, Result, ensure};
use rand::{Rng as _, RngExt as _, rngs::StdRng};

/// The headers of IP and UDP before the frame, in a packet that was kept.
const BELOW: usize = 28;
/// Places in a frame: the tag of the cluster, the salt of its process, its generation, and the length of the
/// id of its node, which follows.
const CLUSTER: usize = 2;
const SALT: std::ops::Range<usize> = 10..26;
const GENERATION: std::ops::Range<usize> = 34..42;
const ID_LENGTH: usize = 70;
/// The longest frame that is read, and the longest datagram.
const FRAME: usize = 1_232;
const DATAGRAM: usize = 65_507;

/// A frame of zstd whose 11 bytes are decompressed to 65,535: the most that chitchat takes in one block.
const BLOCK: [u8; 11] = [
    // The magic number; one segment, whose size is in two bytes, less 256.
    0x28, 0xb5, 0x2f, 0xfd, 0x60, 0xff, 0xfe, // The last block: one byte, 65,535 times.
    0xfb, 0xff, 0x07, b'x',
];
/// How many bytes one [`BLOCK`] has after decompression.
#[cfg(test)]
const EXPANDED: u32 = 65_535;

/// The beginning of a message of chitchat that updates nodes: its magic number, version 0, and the kind
/// `Ack`.
const UPDATE: [u8; 4] = [0x53, 0xb0, 0, 2];
/// A block of a message of chitchat that is compressed.
const COMPRESSED: u8 = 1;

/// Returns an update whose blocks are decompressed to some 300 MiB, in as many bytes as a datagram has at
/// most.
pub(crate) fn bomb() -> Vec<u8> {
    blocks(UPDATE.to_vec(), DATAGRAM)
}

/// Appends compressed blocks up to this length.
fn blocks(mut message: Vec<u8>, most: usize) -> Vec<u8> {
    let length = [BLOCK.len() as u8, 0];
    while message.len() + 1 + length.len() + BLOCK.len() < most {
        message.push(COMPRESSED);
        message.extend(length);
        message.extend(BLOCK);
    }
    // No more blocks.
    message.push(0);
    message
}

/// The frame of a replica, of which forged ones are made.
#[derive(Clone, Debug)]
pub(crate) struct Template(Vec<u8>);

impl Template {
    /// Takes the frame out of a packet that was kept.
    ///
    /// # Errors
    /// If it is none.
    pub(crate) fn of(packet: &[u8]) -> Result<Self> {
        let frame = packet.get(BELOW..).context("a packet has headers of IP and UDP")?;
        let length = usize::from(*frame.get(ID_LENGTH).context("a frame tells the length of an id")?);
        ensure!(frame.len() > ID_LENGTH + length, "a frame has the id of a node, and something behind it");
        Ok(Self(frame.to_vec()))
    }

    /// Everything that a receiver checks before the seal is right but what `change` changes. The id of the
    /// node is this one.
    fn frame(&self, id: &str, rng: &mut StdRng, change: impl FnOnce(&mut [u8])) -> Vec<u8> {
        let mut frame = self.0.get(..ID_LENGTH).unwrap_or_default().to_vec();
        if let Some(salt) = frame.get_mut(SALT) {
            rng.fill_bytes(salt);
        }
        change(&mut frame);
        frame.push(u8::try_from(id.len()).unwrap_or(u8::MAX));
        frame.extend(id.bytes());
        frame
    }

    /// A datagram of a node that does not exist.
    pub(crate) fn fake_node(&self, number: usize, rng: &mut StdRng) -> Vec<u8> {
        let mut frame = self.frame(&format!("fake-{number}"), rng, |_| {});
        let mut sealed = vec![0; rng.random_range(16..200)];
        rng.fill_bytes(&mut sealed);
        frame.extend(sealed);
        frame
    }

    /// The same, of the last process that can ever be.
    pub(crate) fn last_generation(&self, number: usize, rng: &mut StdRng) -> Vec<u8> {
        let mut frame = self.frame(&format!("last-{number}"), rng, |frame| {
            if let Some(generation) = frame.get_mut(GENERATION) {
                generation.fill(0xff);
            }
        });
        frame.extend([0; 32]);
        frame
    }

    /// The same, of another cluster.
    pub(crate) fn other_cluster(&self, number: usize, rng: &mut StdRng) -> Vec<u8> {
        let mut frame = self.frame(&format!("other-{number}"), rng, |frame| {
            if let Some(tag) = frame.get_mut(CLUSTER) {
                *tag ^= 0xff;
            }
        });
        frame.extend([0; 32]);
        frame
    }

    /// A bomb in a frame that is short enough to be read, behind a seal that is none.
    pub(crate) fn sealed_bomb(&self, number: usize, rng: &mut StdRng) -> Vec<u8> {
        let mut frame = self.frame(&format!("bomb-{number}"), rng, |_| {});
        let bomb = blocks(UPDATE.to_vec(), FRAME - frame.len() - 16);
        frame.extend(bomb);
        frame.extend([0; 16]);
        frame
    }
}

#[cfg(test)]
mod tests {
    use rand::SeedableRng as _;

    use super::*;

    /// What the frame of zstd says of itself: its magic number, the size of its content, and one block of one
    /// byte that is repeated.
    fn expanded(block: &[u8; 11]) -> u32 {
        assert_eq!(block[..4], 0xfd2f_b528_u32.to_le_bytes());
        // Single segment, and a size of two bytes, from which 256 was subtracted.
        assert_eq!(block[4], 0b0110_0000);
        let size = u32::from(u16::from_le_bytes([block[5], block[6]])) + 256;
        let header = u32::from_le_bytes([block[7], block[8], block[9], 0]);
        assert_eq!((header & 1, (header >> 1) & 3), (1, 1), "the last one, and repeated");
        assert_eq!(header >> 3, size);
        size
    }

    #[test]
    fn a_bomb_is_what_it_is_called() {
        assert_eq!(expanded(&BLOCK), EXPANDED);
        let bomb = bomb();
        assert!((DATAGRAM - 20..=DATAGRAM).contains(&bomb.len()), "{}", bomb.len());
        let blocks = (bomb.len() - UPDATE.len() - 1) / 14;
        assert_eq!(bomb.len(), UPDATE.len() + blocks * 14 + 1);
        assert!(blocks as u64 * u64::from(EXPANDED) > 290 << 20, "{blocks} blocks");
    }

    #[test]
    fn forged_frames_differ_from_the_template_where_they_say() {
        let mut rng = StdRng::seed_from_u64(1);
        let mut packet = vec![7; BELOW + ID_LENGTH];
        packet.push(3);
        packet.extend(b"abc and a seal that is long enough");
        let template = Template::of(&packet).unwrap();
        let fake = template.fake_node(12, &mut rng);
        assert_eq!(fake[ID_LENGTH..ID_LENGTH + 8], *b"\x07fake-12");
        assert_eq!(fake[..SALT.start], packet[BELOW..BELOW + SALT.start]);
        assert_ne!(fake[SALT], packet[BELOW..][SALT], "each is a process of its own");
        assert_eq!(template.last_generation(1, &mut rng)[GENERATION], [0xff; 8]);
        assert_ne!(template.other_cluster(1, &mut rng)[CLUSTER], packet[BELOW + CLUSTER]);
        let bomb = template.sealed_bomb(1, &mut rng);
        assert!(bomb.len() <= FRAME && bomb.len() > FRAME - 40, "{}", bomb.len());
        assert!(Template::of(&packet[..BELOW + ID_LENGTH]).is_err());
    }
}
