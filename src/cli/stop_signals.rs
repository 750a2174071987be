//! The signals that stop a command: SIGTERM and SIGINT.
//!
//! `muster launch` does not use this module: the launch passes signals on to its tasks (`launch/supervisor.rs`).
//! Begin at [`StopSignals::listen`].

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that stop a command, as they arrive.
pub struct StopSignals {
    terminate: Signal,
    interrupt: Signal,
}

/// A received signal.
#[derive(Debug, Clone, Copy)]
pub struct StopSignal {
    /// Its name.
    pub name: &'static str,
    number: u8,
}

impl StopSignal {
    /// SIGTERM.
    pub const TERMINATE: Self = Self { name: "SIGTERM", number: 15 };
    /// SIGINT.
    const INTERRUPT: Self = Self { name: "SIGINT", number: 2 };

    /// Returns the signal with this number; an unknown one stands for SIGTERM.
    pub fn from_raw(number: i32) -> Self {
        if number == Self::INTERRUPT.as_raw() { Self::INTERRUPT } else { Self::TERMINATE }
    }

    /// Returns its number.
    pub fn as_raw(self) -> i32 {
        self.number.into()
    }

    /// Returns the exit code of a command that the signal ended.
    pub fn exit_code(self) -> ExitCode {
        ExitCode::from(128 + self.number)
    }
}

impl StopSignals {
    /// From now on the signals do not end the process by themselves.
    pub fn listen() -> Result<Self> {
        let listen = |kind| signal(kind).context("cannot listen for signals");
        Ok(Self { terminate: listen(SignalKind::terminate())?, interrupt: listen(SignalKind::interrupt())? })
    }

    /// Waits for the next signal.
    pub async fn next(&mut self) -> StopSignal {
        tokio::select! {
            _ = self.terminate.recv() => StopSignal::TERMINATE,
            _ = self.interrupt.recv() => StopSignal::INTERRUPT,
        }
    }
}
