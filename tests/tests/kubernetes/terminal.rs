//! A terminal for a program that the test runs.

use std::{
    fs::File,
    io::{Read as _, Write as _},
};

use anyhow::{Context as _, Result, ensure};
use rustix::{
    fs::{Mode, OFlags, open},
    pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt},
    termios::{Winsize, tcsetwinsize},
};
use testkit::process::SOON;
use tokio::{sync::watch, time::timeout};

/// The end of a terminal that has a screen and keys.
pub(crate) struct Terminal {
    device: File,
    screen: watch::Receiver<String>,
}

impl Terminal {
    /// Opens a terminal, and returns its other end for the program.
    pub(crate) fn open(rows: u16, columns: u16) -> Result<(Self, File)> {
        let device = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC)
            .context("there are no terminals")?;
        grantpt(&device)?;
        unlockpt(&device)?;
        let name = ptsname(&device, Vec::new())?;
        let flags = OFlags::RDWR | OFlags::NOCTTY | OFlags::CLOEXEC;
        let program = File::from(open(name.as_c_str(), flags, Mode::empty())?);
        let device = File::from(device);
        let (shown, screen) = watch::channel(String::new());
        let mut output = device.try_clone()?;
        std::thread::Builder::new().name("terminal".to_owned()).spawn(move || {
            let mut piece = [0; 4096];
            // Reading fails once no program has the other end.
            while let Ok(bytes @ 1..) = output.read(&mut piece) {
                shown.send_modify(|all| all.push_str(&String::from_utf8_lossy(&piece[..bytes])));
            }
        })?;
        let terminal = Self { device, screen };
        terminal.resize(rows, columns)?;
        Ok((terminal, program))
    }

    /// Changes its size. The program is not told.
    pub(crate) fn resize(&self, rows: u16, columns: u16) -> Result<()> {
        let size = Winsize { ws_row: rows, ws_col: columns, ws_xpixel: 0, ws_ypixel: 0 };
        Ok(tcsetwinsize(&self.device, size)?)
    }

    /// Presses keys.
    pub(crate) fn press(&mut self, keys: &[u8]) -> Result<()> {
        Ok(self.device.write_all(keys)?)
    }

    /// Returns everything that was shown.
    pub(crate) fn screen(&self) -> String {
        self.screen.borrow().clone()
    }

    /// Waits until a text has been shown.
    pub(crate) async fn shows(&self, text: &str) -> Result<()> {
        let mut screen = self.screen.clone();
        let shown = timeout(SOON, screen.wait_for(|screen| screen.contains(text))).await;
        let has_shown = matches!(shown, Ok(Ok(_)));
        drop(shown);
        ensure!(has_shown, "the terminal does not show {text:?}, but {:?}", self.screen());
        Ok(())
    }
}
