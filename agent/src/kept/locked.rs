//! Shell: ends kept connections by the kernel half's program `end`, which looks at each and ends it while it holds its lock.
//!
//! A client's write comes before that and spares the connection, or after it and fails without a byte sent. By sock_diag,
//! look and end are two calls, and a request that is written between them is lost. Since 6.5; on older kernels, and where
//! the kernel refuses, the agent goes on without.

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

/// The program.
const END: &str = "end";
/// The kernel's function that ends a locked socket.
const DESTROY: &str = "bpf_sock_destroy";

/// Why connections are not ended under their locks.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// It does not describe itself, or in words that are not known.
    #[error("cannot read the kernel's types from {}", btf::FILE)]
    Types(#[source] io::Error),
    /// The library cannot read them.
    #[error("cannot read the kernel's types")]
    Btf(#[from] BtfError),
    /// It is older than 6.5, or built without.
    #[error("the kernel has no function {DESTROY} (6.5)")]
    Function,
    /// Its sockets are others than those that are known.
    #[error("the kernel's sockets have no field {0}")]
    Field(&'static str),
    /// The object is not what it should be.
    #[error("the kernel half has no program {END} with one call of {DESTROY}")]
    Object,
    /// The program is refused.
    #[error("the kernel refuses program {END}")]
    Program(#[from] ProgramError),
    /// Its map cannot be used.
    #[error("cannot use map {}", maps::ENDING)]
    Map(#[from] MapError),
    /// It cannot be made ready.
    #[error("cannot link program {END}")]
    Link(#[source] io::Error),
}

/// What the running kernel offers for this.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Offer {
    /// Number of the function.
    function: u32,
    /// Where fields of sockets are.
    pub(crate) fields: SocketFields,
}

impl Offer {
    /// Asks the running kernel.
    pub(crate) fn look() -> Result<Self, Error> {
        let bytes = fs::read(btf::FILE).map_err(Error::Types)?;
        let unknown = || Error::Types(io::ErrorKind::InvalidData.into());
        let types = Types::read(&bytes).ok_or_else(unknown)?;
        let function = types.function(DESTROY).ok_or(Error::Function)?;
        Ok(Self { function, fields: types.socket_fields().map_err(Error::Field)? })
    }

    /// A copy of the object with the call of this kernel's function in the place that was kept for it. The library cannot
    /// do that yet.
    pub(crate) fn fill_in(&self, object: &[u8]) -> Result<Filled, Error> {
        let mut filled = Filled::copy(object);
        let kept = call(HELPER, abi::SOCK_DESTROY);
        // Instructions are aligned to their size, in memory as in the file.
        let mut places = filled.bytes_mut().chunks_exact_mut(8).filter(|word| **word == kept);
        match (places.next(), places.next()) {
            (Some(place), None) => place.copy_from_slice(&call(FUNCTION, self.function)),
            _ => return Err(Error::Object),
        }
        Ok(filled)
    }
}

/// A call of a helper, and of a function of the kernel's (`BPF_PSEUDO_KFUNC_CALL`), as told in the instruction.
const HELPER: u8 = 0;
const FUNCTION: u8 = 2;

/// `struct bpf_insn` of a call: code, registers, offset, number.
fn call(kind: u8, number: u32) -> [u8; 8] {
    const CALL: u8 = 0x85;
    // The source register is the high half where the machine's byte order is little-endian.
    let registers = if cfg!(target_endian = "big") { kind } else { kind << 4 };
    let [a, b, c, d] = number.to_ne_bytes();
    [CALL, registers, 0, 0, a, b, c, d]
}

/// An object of our own, aligned to 8 bytes as the loader needs it.
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

    /// The object.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.room[self.begin..][..self.length]
    }
}

/// Ends connections under their locks.
#[derive(Debug)]
pub struct Ender {
    link: OwnedFd,
    ending: HashMap<MapData, u64, Ending>,
}

/// What became of connections that were to be ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Ended.
    pub ended: u64,
    /// Left alone, because they were used meanwhile or are in use.
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

    /// Ends those of the calling thread's network namespace, each unless anything was written or came since it was listed,
    /// or is under way or not answered.
    pub fn end(&mut self, connections: &[&Connection]) -> io::Result<Done> {
        let mut done = Done::default();
        for some in connections.chunks(abi::ENDING_MAX as usize) {
            let ended = self.end_some(some);
            // Also after a failure: what is left over would be ended at the next walk.
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

    /// What became of one, which is forgotten.
    fn take(&mut self, cookie: u64) -> io::Result<Done> {
        let found = match self.ending.get(&cookie, 0) {
            Ok(found) => found,
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
