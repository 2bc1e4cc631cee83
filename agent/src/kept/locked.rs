//! Shell: closes stale connections by the eBPF program `end`, which checks and closes each while it holds the socket's
//! lock.
//!
//! A client's write comes before that and spares the connection, or after it and fails without a byte sent. By
//! sock_diag, check and close are two calls, and a request that is written in between is lost. Needs Linux 6.5; on
//! older kernels, and if the kernel refuses the program, the agent works without it.

use std::{
    fs, io,
    os::fd::{AsFd as _, OwnedFd},
};

use aya::{
    Btf, BtfError, Ebpf,
    maps::{HashMap, MapData, MapError},
    programs::{Program, ProgramError},
};
use common::abi::{self, Ending, SocketFields, maps};

use crate::{
    btf::{self, Types},
    sockdiag::Connection,
    sys,
};

/// Name of the eBPF program.
const END: &str = "end";
/// Kernel function that closes a locked socket.
const DESTROY: &str = "bpf_sock_destroy";

/// Reason for which connections are not closed under their locks.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The kernel has no BTF, or in an unknown format.
    #[error("cannot read the kernel's types from {}", btf::FILE)]
    Types(#[source] io::Error),
    /// The library cannot read the kernel's BTF.
    #[error("cannot read the kernel's types")]
    Btf(#[from] BtfError),
    /// The kernel is older than 6.5, or built without the function.
    #[error("the kernel has no function {DESTROY} (6.5)")]
    Function,
    /// The kernel's socket structures lack a field that the program reads.
    #[error("the kernel's sockets have no field {0}")]
    Field(&'static str),
    /// The object has not exactly one place for the call.
    #[error("the eBPF object has no program {END} with one call of {DESTROY}")]
    Object,
    /// The kernel refuses to load the program.
    #[error("the kernel refuses program {END}")]
    Program(#[from] ProgramError),
    /// The program's map cannot be used.
    #[error("cannot use map {}", maps::ENDING)]
    Map(#[from] MapError),
    /// The program cannot be linked as an iterator.
    #[error("cannot link program {END}")]
    Link(#[source] io::Error),
}

/// Support of the running kernel for this program.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// BTF id of the function.
    function: u32,
    /// Offsets of the fields of sockets.
    pub(crate) fields: SocketFields,
}

impl Offer {
    /// Detects the support of the running kernel.
    pub(crate) fn look() -> Result<Self, Error> {
        let bytes = fs::read(btf::FILE).map_err(Error::Types)?;
        let unknown = || Error::Types(io::ErrorKind::InvalidData.into());
        let types = Types::read(&bytes).ok_or_else(unknown)?;
        let function = types.function(DESTROY).ok_or(Error::Function)?;
        Ok(Self { function, fields: types.socket_fields().map_err(Error::Field)? })
    }

    /// Returns a copy of the object with the call of this kernel's function in its reserved place. The library cannot
    /// link kernel functions yet.
    pub(crate) fn fill_in(&self, object: &[u8]) -> Result<Filled, Error> {
        let mut filled = Filled::copy(object);
        let kept = call(HELPER, abi::SOCK_DESTROY);
        // Instructions are aligned to their size, in memory and in the file.
        let mut places = filled.bytes_mut().chunks_exact_mut(8).filter(|word| **word == kept);
        match (places.next(), places.next()) {
            (Some(place), None) => place.copy_from_slice(&call(FUNCTION, self.function)),
            _ => return Err(Error::Object),
        }
        Ok(filled)
    }
}

/// Source register of a call instruction: a helper's number follows.
const HELPER: u8 = 0;
/// Source register of a call instruction: the BTF id of a kernel function follows (`BPF_PSEUDO_KFUNC_CALL`).
const FUNCTION: u8 = 2;

/// Encodes `struct bpf_insn` of a call: code, registers, offset, number.
fn call(kind: u8, number: u32) -> [u8; 8] {
    const CALL: u8 = 0x85;
    // On a little-endian machine the source register is the high half.
    let registers = if cfg!(target_endian = "big") { kind } else { kind << 4 };
    let [a, b, c, d] = number.to_ne_bytes();
    [CALL, registers, 0, 0, a, b, c, d]
}

/// Copy of an object, aligned to 8 bytes as the loader needs it.
#[derive(Debug)]
pub(crate) struct Filled {
    room: Vec<u8>,
    begin: usize,
    length: usize,
}

impl Filled {
    fn copy(object: &[u8]) -> Self {
        let length = object.len();
        let mut room = vec![0; length + 8];
        let begin = room.as_ptr().align_offset(8) % 8;
        room[begin..][..length].copy_from_slice(object);
        Self { room, begin, length }
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut self.room[self.begin..][..self.length]
    }

    /// Returns the bytes of the object.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.room[self.begin..][..self.length]
    }
}

/// Closes connections under their locks.
#[derive(Debug)]
pub struct Ender {
    link: OwnedFd,
    ending: HashMap<MapData, u64, Ending>,
}

/// Numbers of connections by the outcome of their close.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Connections that were closed.
    pub ended: u64,
    /// Connections that were left alone, because they were used meanwhile or are in use.
    pub spared: u64,
}

impl std::ops::AddAssign for Done {
    fn add_assign(&mut self, other: Self) {
        self.ended += other.ended;
        self.spared += other.spared;
    }
}

impl Ender {
    /// Loads the program of an object that was [filled in](Offer::fill_in), and takes its map.
    pub(crate) fn load(ebpf: &mut Ebpf) -> Result<Self, Error> {
        let btf = Btf::from_sys_fs()?;
        let Some(Program::Iter(program)) = ebpf.program_mut(END) else { return Err(Error::Object) };
        program.load("tcp", &btf)?;
        let link = sys::link_walk(program.fd()?.as_fd()).map_err(Error::Link)?;
        let ending = ebpf.take_map(maps::ENDING).ok_or(Error::Object)?;
        Ok(Self { link, ending: HashMap::try_from(ending)? })
    }

    /// Closes connections in the calling thread's network namespace. It spares a connection if a byte was written or
    /// received since it was listed, or if a message is under way or unanswered.
    pub fn end(&mut self, connections: &[&Connection]) -> io::Result<Done> {
        let mut done = Done::default();
        for some in connections.chunks(abi::ENDING_MAX as usize) {
            let ended = self.end_some(some);
            // Also after a failure: an entry that stays would be closed at the next walk.
            for connection in some {
                done += self.take(connection.cookie())?;
            }
            ended?;
        }
        Ok(done)
    }

    fn end_some(&mut self, connections: &[&Connection]) -> io::Result<()> {
        for connection in connections {
            let ending = Ending {
                acked: connection.seen.bytes_acked,
                received: connection.seen.bytes_received,
                verdict: abi::ENDING_UNSEEN,
            };
            self.ending.insert(connection.cookie(), ending, 0).map_err(io::Error::other)?;
        }
        sys::walk(self.link.as_fd())
    }

    /// Removes a connection's entry, and returns its outcome.
    fn take(&mut self, cookie: u64) -> io::Result<Done> {
        let found = match self.ending.get(&cookie, 0) {
            Ok(found) => found,
            // An insertion that failed has left no entry.
            Err(MapError::KeyNotFound) => return Ok(Done::default()),
            Err(error) => return Err(io::Error::other(error)),
        };
        self.ending.remove(&cookie).map_err(io::Error::other)?;
        let is = |verdict| u64::from(found.verdict == verdict);
        Ok(Done { ended: is(abi::ENDING_ENDED), spared: is(abi::ENDING_SPARED) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_one_place_for_the_call_is_filled_in() {
        let offer = Offer { function: 0x1234_5678, fields: SocketFields::default() };
        let kept = call(HELPER, abi::SOCK_DESTROY);
        let object = [[1; 8], kept, [2; 8]].concat();
        let filled = offer.fill_in(&object).expect("one place");
        assert_eq!(filled.bytes(), [[1; 8], call(FUNCTION, 0x1234_5678), [2; 8]].concat());
        assert_eq!(filled.bytes().as_ptr().align_offset(8), 0);
        for object in [vec![1; 16], [kept, kept].concat(), [&[0; 4], &kept[..]].concat()] {
            assert!(matches!(offer.fill_in(&object), Err(Error::Object)));
        }
    }
}
