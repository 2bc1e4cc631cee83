//! Shell: the eBPF programs: loads, attaches, pins and replaces them.
//!
//! Pins are in `bpf/v<ABI>/`, or in `bpf/v<ABI>-<sizes>/` if the maps have other sizes than the default ones: maps by
//! their names, links in `links/`. They outlive the agent, so connects work without it. The next agent puts its
//! programs into the same links, so there is no moment without programs.

use std::{
    collections::BTreeMap,
    ffi::OsStr,
    fs::{self, File},
    io,
    os::{
        fd::{AsFd as _, BorrowedFd, OwnedFd},
        unix::fs::MetadataExt as _,
    },
    path::{Path, PathBuf},
};

use aya::{
    Ebpf, EbpfError, VerifierLogLevel,
    programs::{Program, ProgramError},
};
use datapath::abi::{self, maps};
use tracing::{debug, info};

use crate::{
    incompatible::ForeignProgramOwner,
    kernel::{
        cgroup_search,
        features::VerifierFeatures,
        locked_close::LockedCloser,
        maps::{self as tables, KernelMaps, client_sockets::UdpSocketCopy},
        sys,
    },
    paths::AgentPaths,
};

use self::load::{OpenedObject, load_programs, log_unsupported, open_object, set_tail_call};
use self::versions::{
    CLIENT_SOCKET_PROGRAMS, has_any_link, remove_link, remove_pin, retire, retire_or_keep,
    retire_other_versions, version_of,
};

mod load;
mod self_test;
mod storage_flags;
mod versions;

/// The eBPF programs as built by `cargo xtask build-ebpf`; empty in a plain `cargo build`.
static OBJECT: &[u8] = aya::include_bytes_aligned!(concat!(env!("OUT_DIR"), "/rouse-ebpf"));

/// Reason for which the eBPF programs are not in force.
#[derive(Debug, thiserror::Error)]
pub enum EbpfProgramsError {
    /// The build contains no eBPF programs.
    #[error(
        "this build has no eBPF programs: run `cargo xtask build-ebpf` and build with \
         ROUSE_EBPF_OBJECT set to the file it names (`cargo xtask demo` and `test` do both)"
    )]
    Stub,
    /// The object has another ABI version than the agent.
    #[error(
        "the eBPF programs are not of ABI version {}: run `cargo xtask build-ebpf` again",
        abi::ABI_VERSION
    )]
    AbiMismatch,
    /// A pinned map does not match this version's layout.
    #[error(
        "pinned map {name} has shape {found:?} instead of {wanted:?} (type, key, value, entries): stop the agent \
         and remove {}", pins.display()
    )]
    MapShape {
        /// Name of the map.
        name: &'static str,
        /// Shape of the pinned map: type, key size, value size, entries.
        found: [u32; 4],
        /// Shape that this version needs.
        wanted: [u32; 4],
        /// Folder of pins that the operator may remove.
        pins: PathBuf,
    },
    /// A folder, file or mount cannot be used.
    #[error("cannot {attempt} {}", path.display())]
    Path {
        /// Verb of the failed operation.
        attempt: &'static str,
        /// Path that the operation was on.
        path: PathBuf,
        source: io::Error,
    },
    /// The object cannot be loaded.
    #[error("cannot load the eBPF programs")]
    Load(#[source] Box<EbpfError>),
    /// The kernel refused a program.
    #[error("the kernel refuses program {name}")]
    Program {
        /// Name of the program.
        name: &'static str,
        /// Error of the load, with the verifier's log.
        source: Box<ProgramError>,
    },
    /// A program cannot be attached.
    #[error("cannot attach program {name} to cgroup {}", cgroup.display())]
    Attach {
        /// Name of the program.
        name: &'static str,
        /// Cgroup that it was to be attached to.
        cgroup: PathBuf,
        source: io::Error,
    },
    /// The maps cannot be used.
    #[error(transparent)]
    Maps(#[from] tables::KernelMapError),
    /// The programs are attached, and yet do not see events in the cgroup.
    #[error("the self-test in {} failed: {what}", cgroup.display())]
    SelfTest {
        /// Cgroup in which the self-test ran.
        cgroup: PathBuf,
        /// Step of the self-test that failed.
        what: String,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AttachCgroup {
    Clients,
    Pods,
}

/// Attached programs: name, the kernel's attach type (`enum bpf_attach_type`), cgroup.
///
/// Pods' programs come first: a connect that is redirected to a local pod relies on their records. Programs that show
/// addresses come before those that replace them.
const CGROUP_PROGRAMS: [(&str, u32, AttachCgroup); 14] = [
    ("bind4", 8, AttachCgroup::Pods),
    ("bind6", 9, AttachCgroup::Pods),
    ("sockets", 3, AttachCgroup::Pods),
    ("ingress", 0, AttachCgroup::Pods),
    ("egress", 1, AttachCgroup::Pods),
    ("release", 34, AttachCgroup::Clients),
    ("getpeername4", 29, AttachCgroup::Clients),
    ("getpeername6", 30, AttachCgroup::Clients),
    ("recvmsg4", 19, AttachCgroup::Clients),
    ("recvmsg6", 20, AttachCgroup::Clients),
    ("sendmsg4", 14, AttachCgroup::Clients),
    ("sendmsg6", 15, AttachCgroup::Clients),
    ("connect4", 10, AttachCgroup::Clients),
    ("connect6", 11, AttachCgroup::Clients),
];

/// Programs among them that follow the tables.
const TABLE_PROGRAMS: [&str; 4] = ["sendmsg4", "sendmsg6", "connect4", "connect6"];

/// Programs among them at whose hooks other load balancers are looked for.
const CONNECT_PROGRAMS: [&str; 2] = ["connect4", "connect6"];

/// Targets of tail calls: the program, the array that holds it, its index. The first entry of an array is the calling
/// program itself. The others inspect connections from the node itself, or read another protocol than HTTP/1.
const TAIL_CALLS: [(&str, &str, u32); 18] = [
    ("ingress", maps::INGRESS, 0),
    ("suspects", maps::INGRESS, 1),
    ("ingress_http2", maps::INGRESS, 2),
    ("ingress_other", maps::INGRESS, 3),
    ("ingress_late", maps::INGRESS, 4),
    ("ingress_late_http2", maps::INGRESS, 5),
    ("ingress_more", maps::INGRESS, 6),
    ("ingress_more_http2", maps::INGRESS, 7),
    ("ingress_keep", maps::INGRESS, 8),
    ("egress", maps::EGRESS, 0),
    ("egress_http2", maps::EGRESS, 2),
    ("egress_other", maps::EGRESS, 3),
    ("egress_more", maps::EGRESS, 6),
    ("egress_more_http2", maps::EGRESS, 7),
    ("sockets", maps::SOCKETS, 0),
    ("sockets_other", maps::SOCKETS, 3),
    ("sockets_late", maps::SOCKETS, 4),
    ("sockets_late_http2", maps::SOCKETS, 5),
];

/// Program that marks the kubelet's connections, in the kubelet's own cgroup.
const KUBELET_PROGRAM: &str = "kubelet";
/// Attach type of the program `kubelet`, which is that of `sockets`.
const ATTACH_SOCK_OPS: u32 = 3;

/// Program that assigns connections to the activator's listener, attached to a network namespace instead of a cgroup.
const PORTS_PROGRAM: &str = "ports";
/// Attach type of the program `ports`.
const ATTACH_SK_LOOKUP: u32 = 36;

/// The loaded eBPF programs. A drop leaves all of them in force.
#[derive(Debug)]
pub struct EbpfPrograms {
    ebpf: Ebpf,
    paths: AgentPaths,
    /// Cgroup of the kubelet that was found, if no setting names one.
    found_kubelet: Option<PathBuf>,
    /// Network namespace where one listener serves the ports of all services.
    activator_netns: Option<PathBuf>,
    /// Pins of the previous version, whose programs still count the connections that they saw established.
    previous_pins: Option<PathBuf>,
    /// True if connects still follow the previous version's tables, as this version's are empty.
    follows_previous: bool,
    /// Pins of versions that count nothing any more, while client sockets are open whose connects they rewrote.
    outlived_pins: Vec<PathBuf>,
    /// Closer of stale connections until it is taken; `None` if the kernel does not support it.
    locked_closer: Option<LockedCloser>,
}

impl EbpfPrograms {
    /// Loads the embedded programs, resumes from pinned maps, and replaces the programs in force.
    pub fn load(paths: AgentPaths) -> Result<Self, EbpfProgramsError> {
        Self::load_object(OBJECT, paths)
    }

    /// Loads a given object like [`load`](Self::load). `object` must be aligned to 8 bytes.
    pub fn load_object(object: &[u8], paths: AgentPaths) -> Result<Self, EbpfProgramsError> {
        Self::load_with(object, paths, VerifierFeatures::detect())
    }

    /// Loads a given object like [`load_object`](Self::load_object), with these features instead of the kernel's.
    pub fn load_with(
        object: &[u8],
        paths: AgentPaths,
        features: VerifierFeatures,
    ) -> Result<Self, EbpfProgramsError> {
        let pins = paths.pins();
        let opened = open_object(object, &paths, features, VerifierLogLevel::default())?;
        let OpenedObject { mut ebpf, previous_pins, locked_close } = opened;
        let locked_closer = locked_close.and_then(|()| LockedCloser::load(&mut ebpf));
        // An agent that completed the takeover continues with its own tables; one that stopped halfway repeats it.
        let follows_previous =
            previous_pins.as_ref().is_some_and(|pins| has_any_link(pins, &TABLE_PROGRAMS));
        let (found_kubelet, activator_netns, outlived_pins, locked_closer) =
            (None, None, Vec::new(), log_unsupported(locked_closer));
        let mut programs = Self {
            ebpf,
            paths,
            found_kubelet,
            activator_netns,
            previous_pins,
            follows_previous,
            outlived_pins,
            locked_closer,
        };
        load_programs(&mut programs.ebpf)?;
        // Before the attach: without its tail calls a program would not count the rest of a packet.
        for (name, array, index) in TAIL_CALLS {
            set_tail_call(&mut programs.ebpf, name, array, index)?;
        }
        // Before the attach: the first self-test needs its frontends.
        KernelMaps::open(&pins)?.write_self_test_frontends()?;
        programs.attach_or_replace(programs.wanted_programs())?;
        programs.mark_kubelet();
        if let Some(pins) = &programs.previous_pins {
            info!(pins = %pins.display(), "programs of another version go on counting what they count");
        }
        programs.outlived_pins =
            retire_other_versions(&programs.paths, programs.previous_pins.as_deref());
        info!(pins = %pins.display(), abi = abi::ABI_VERSION, ?features, "eBPF programs in force");
        Ok(programs)
    }

    /// Returns the closer of stale connections at the first call; `None` later, or if the kernel does not support it.
    pub fn take_locked_closer(&mut self) -> Option<LockedCloser> {
        self.locked_closer.take()
    }

    /// Returns the pins of the previous version, while its programs are also in force.
    pub fn previous_pins(&self) -> Option<&Path> {
        self.previous_pins.as_deref()
    }

    /// Returns true while connects follow the tables of the previous version.
    pub fn follows_previous(&self) -> bool {
        self.follows_previous
    }

    /// Returns the pins of the tables that connects follow, if these are of the same version and have other sizes.
    pub fn earlier_tables(&self) -> Option<&Path> {
        let is_same_version = |pins: &&Path| {
            let name = pins.file_name().and_then(OsStr::to_str);
            name.and_then(version_of) == Some(self.paths.version)
        };
        self.previous_pins().filter(|_| self.follows_previous).filter(is_same_version)
    }

    /// Lets connects follow this version's tables, which the caller has filled, instead of the previous version's.
    ///
    /// After an error, call it again: completed steps stay.
    pub fn take_over(&mut self) -> Result<(), EbpfProgramsError> {
        if !self.follows_previous {
            return Ok(());
        }
        // Before this version's programs: they look up the socket of each datagram that names a service.
        let old = self.previous_pins.as_deref();
        let mut sockets = old.and_then(|old| UdpSocketCopy::open(old, &self.paths.pins()));
        sockets.iter_mut().for_each(UdpSocketCopy::copy_changed);
        // Both are in force for a moment: an address that one has rewritten is no service's address to the other.
        let following =
            CGROUP_PROGRAMS.into_iter().filter(|(name, ..)| TABLE_PROGRAMS.contains(name));
        self.attach_or_replace(following)?;
        if let Some(old) = &self.previous_pins {
            TABLE_PROGRAMS.iter().try_for_each(|name| remove_link(old, name))?;
            info!(old = %old.display(), "connects follow this version's tables");
        }
        // Sockets that the old programs have led since the first copy.
        sockets.iter_mut().for_each(UdpSocketCopy::copy_changed);
        self.follows_previous = false;
        Ok(())
    }

    /// Detaches the previous version's programs, which have nothing left to count. The programs that serve clients'
    /// sockets stay while sockets are open whose connects they rewrote.
    ///
    /// After an error, call it again.
    pub fn retire_previous(&mut self) -> Result<(), EbpfProgramsError> {
        self.take_over()?;
        let Some(old) = &self.previous_pins else { return Ok(()) };
        let stays = retire(old)?;
        self.outlived_pins.extend(self.previous_pins.take().filter(|_| stays));
        Ok(())
    }

    /// Removes the rest of other versions whose clients' sockets have all closed. Returns the number of versions left.
    pub fn remove_outlived_pins(&mut self) -> usize {
        self.outlived_pins.retain(|pins| retire_or_keep(pins));
        self.outlived_pins.len()
    }

    /// Lets one listener serve the ports of all services in an activator's network namespace: attaches the program
    /// `ports` there, until its pin is removed.
    pub fn serve_ports(&mut self, netns: &Path) -> Result<(), EbpfProgramsError> {
        let (target, inode) = open_netns(netns)?;
        self.activator_netns = Some(netns.to_owned());
        // A link in another namespace belongs to an earlier activator, and is replaced.
        let Some(link) = self.ports_link_in(inode) else {
            return self.attach_ports(netns, &target);
        };
        let replaced = self.with_program(PORTS_PROGRAM, |it| sys::link_update(link.as_fd(), it))?;
        replaced.map_err(|source| {
            path_error("put a program into link", &self.link_pin(PORTS_PROGRAM), source)
        })
    }

    /// Returns the pinned link of the program `ports`, if it is attached to this namespace.
    fn ports_link_in(&self, inode: u64) -> Option<OwnedFd> {
        let link = sys::open_pin(&self.link_pin(PORTS_PROGRAM)).ok()?;
        sys::link_netns(link.as_fd()).is_ok_and(|link_inode| link_inode == inode).then_some(link)
    }

    fn attach_ports(&self, netns: &Path, target: &File) -> Result<(), EbpfProgramsError> {
        let made = self.with_program(PORTS_PROGRAM, |it| {
            sys::link_create(it, target.as_fd(), ATTACH_SK_LOOKUP)
        })?;
        self.pin_link(
            PORTS_PROGRAM,
            made.map_err(|e| path_error("use network namespace", netns, e))?,
        )?;
        info!(program = PORTS_PROGRAM, netns = %netns.display(), "program attached");
        Ok(())
    }

    /// Returns the number of foreign programs that redirect connects in the clients' cgroup or above it, by owner.
    /// Rouse's programs run first if the foreign ones are in a cgroup above. In the same cgroup, the one that was
    /// attached first runs first.
    pub fn foreign_programs(&self) -> BTreeMap<ForeignProgramOwner, usize> {
        let AgentPaths { clients, pods, .. } = &self.paths;
        count_foreign_programs(clients, &[clients, pods])
    }

    /// Returns the folder of the pinned maps, for [`KernelMaps::open`].
    pub fn pins(&self) -> PathBuf {
        self.paths.pins()
    }

    /// Detaches the programs at once; [`keep_attached`](Self::keep_attached) attaches them again.
    pub fn detach(&self) -> Result<(), EbpfProgramsError> {
        versions::remove_links(&self.pins())
    }

    /// Returns the number of instructions that the verifier walked for each loaded program (5.16; 0 before). Its limit
    /// is a million.
    pub fn verified_instructions(&self) -> Vec<(&str, u32)> {
        let count = |program: &Program| {
            Some(program.info().ok()?.verified_instruction_count().unwrap_or(0))
        };
        self.ebpf.programs().filter_map(|(name, it)| Some((name, count(it)?))).collect()
    }

    /// Attaches programs again that are not attached any more: a cgroup or namespace that was removed and made again is
    /// a new one. Returns the number of programs attached. Call it from time to time.
    pub fn keep_attached(&self) -> Result<usize, EbpfProgramsError> {
        let mut attached = 0;
        for (name, attach_type, cgroup) in self.wanted_programs() {
            let path = self.cgroup_path(cgroup);
            let folder = open_folder(path)?;
            if !self.is_attached(name, path, &folder)? {
                self.attach_new(name, attach_type, path, &folder)?;
                attached += 1;
            }
        }
        self.mark_kubelet();
        if let Some(netns) = &self.activator_netns {
            let (target, inode) = open_netns(netns)?;
            if self.ports_link_in(inode).is_none() {
                self.attach_ports(netns, &target)?;
                attached += 1;
            }
        }
        Ok(attached)
    }

    /// Returns the programs that should be in force now.
    fn wanted_programs(&self) -> impl Iterator<Item = (&'static str, u32, AttachCgroup)> {
        let waits = self.follows_previous;
        CGROUP_PROGRAMS
            .into_iter()
            .filter(move |(name, ..)| !(waits && TABLE_PROGRAMS.contains(name)))
    }

    fn attach_or_replace(
        &self,
        programs: impl Iterator<Item = (&'static str, u32, AttachCgroup)>,
    ) -> Result<(), EbpfProgramsError> {
        for (name, attach_type, cgroup) in programs {
            let path = self.cgroup_path(cgroup);
            let folder = open_folder(path)?;
            // Replaced in place where a link exists, so that no connect comes to a cgroup without the program.
            if self.try_replace(name, path, &folder)? {
                debug!(program = name, "program replaced in place");
            } else {
                self.attach_new(name, attach_type, path, &folder)?;
            }
        }
        Ok(())
    }

    /// Searches for the kubelet's cgroup, if no setting names one. A cgroup that is gone stays known: the kubelet makes
    /// it again when it restarts, mostly as a new one of the same name.
    pub fn find_kubelet(&mut self) {
        if self.paths.kubelet.is_some() {
            return;
        }
        let kubelet = cgroup_search::find_kubelet_cgroup(&self.paths.pods);
        if kubelet.is_some() && kubelet != self.found_kubelet {
            info!(cgroup = ?kubelet, "cgroup of this node's kubelet found");
            self.found_kubelet = kubelet;
            self.mark_kubelet();
        }
    }

    /// Marks the kubelet's connections, if its cgroup is known. Otherwise its probes are known by their User-Agent
    /// only, so a failure here is no error of the agent.
    fn mark_kubelet(&self) {
        let Some(path) = self.paths.kubelet.as_ref().or(self.found_kubelet.as_ref()) else {
            return;
        };
        let marked = open_folder(path).and_then(|folder| {
            // A cgroup that also holds pods would mark their requests as probes.
            if self.paths.pods.starts_with(path) {
                return Err(path_error(
                    "mark connections of",
                    path,
                    io::ErrorKind::InvalidInput.into(),
                ));
            }
            match self.try_replace(KUBELET_PROGRAM, path, &folder)? {
                true => Ok(()),
                false => self.attach_new(KUBELET_PROGRAM, ATTACH_SOCK_OPS, path, &folder),
            }
        });
        if let Err(error) = marked {
            debug!(error = %common::link::error_chain(&error), "cannot mark the kubelet's probes");
        }
    }

    /// Returns true while connections from the kubelet's cgroup are marked as probes, and false if that is not known.
    pub fn is_kubelet_marked(&self) -> bool {
        let path = self.paths.kubelet.as_ref().or(self.found_kubelet.as_ref());
        let is_attached = |path: &PathBuf| {
            let folder = open_folder(path)?;
            self.is_attached(KUBELET_PROGRAM, path, &folder)
        };
        path.is_some_and(|path| is_attached(path).unwrap_or(false))
    }

    fn cgroup_path(&self, cgroup: AttachCgroup) -> &Path {
        match cgroup {
            AttachCgroup::Clients => &self.paths.clients,
            AttachCgroup::Pods => &self.paths.pods,
        }
    }

    fn link_pin(&self, name: &str) -> PathBuf {
        self.pins().join("links").join(name)
    }

    /// Returns true if the program is attached to this cgroup.
    ///
    /// One that serves clients' sockets may also be attached to a cgroup above, where the clients' cgroup was before:
    /// open sockets outside of the present one still need it.
    fn is_attached(
        &self,
        name: &'static str,
        path: &Path,
        cgroup: &File,
    ) -> Result<bool, EbpfProgramsError> {
        let pin = self.link_pin(name);
        let Ok(link) = sys::open_pin(&pin) else { return Ok(false) };
        let wanted = cgroup.metadata().map(|metadata| metadata.ino());
        let wanted = wanted.map_err(|source| path_error("stat the cgroup for", &pin, source))?;
        let linked = sys::link_cgroup(link.as_fd());
        let linked = linked.map_err(|source| path_error("ask about link", &pin, source))?;
        let may_be_above = CLIENT_SOCKET_PROGRAMS.contains(&name);
        let is_above = || may_be_above && cgroups_above(path).any(|inode| inode == linked);
        Ok(linked == wanted || is_above())
    }

    /// Puts the program into the pinned link, if that is still attached to this cgroup. Returns true if it did.
    fn try_replace(
        &self,
        name: &'static str,
        cgroup_path: &Path,
        cgroup: &File,
    ) -> Result<bool, EbpfProgramsError> {
        if !self.is_attached(name, cgroup_path, cgroup)? {
            return Ok(false);
        }
        let path = self.link_pin(name);
        let link = sys::open_pin(&path).map_err(|source| path_error("open link", &path, source))?;
        let replaced =
            self.with_program(name, |program| sys::link_update(link.as_fd(), program))?;
        match replaced {
            Ok(()) => Ok(true),
            // The cgroup was removed between the two calls.
            Err(error) if error.raw_os_error() == Some(libc::ENOLINK) => Ok(false),
            Err(source) => Err(path_error("put a program into link", &path, source)),
        }
    }

    fn attach_new(
        &self,
        name: &'static str,
        attach_type: u32,
        path: &Path,
        cgroup: &File,
    ) -> Result<(), EbpfProgramsError> {
        let refused = |source| EbpfProgramsError::Attach { name, cgroup: path.to_owned(), source };
        let made = self
            .with_program(name, |program| sys::link_create(program, cgroup.as_fd(), attach_type))?;
        self.pin_link(name, made.map_err(refused)?)?;
        info!(program = name, cgroup = %path.display(), "program attached");
        Ok(())
    }

    fn pin_link(&self, name: &str, link: OwnedFd) -> Result<(), EbpfProgramsError> {
        let pin = self.link_pin(name);
        remove_pin(&pin)?;
        sys::pin(link.as_fd(), &pin).map_err(|source| path_error("pin link", &pin, source))
    }

    fn with_program<T>(
        &self,
        name: &'static str,
        act: impl FnOnce(BorrowedFd<'_>) -> T,
    ) -> Result<T, EbpfProgramsError> {
        let program = self.ebpf.program(name).ok_or(EbpfProgramsError::AbiMismatch)?;
        let fd =
            program.fd().map_err(|e| EbpfProgramsError::Program { name, source: Box::new(e) })?;
        Ok(act(fd.as_fd()))
    }
}

/// Returns the eBPF programs inside this build; empty in a plain build.
pub fn embedded_object() -> &'static [u8] {
    OBJECT
}

/// Opens an object with its maps and loads none of its programs, for tests that load each by itself. `object` must be
/// aligned to 8 bytes.
///
/// The programs are those for a kernel with these features. `log` is the level of the verifier's log for a program that
/// the kernel refuses.
pub fn open_unloaded(
    object: &[u8],
    paths: &AgentPaths,
    features: VerifierFeatures,
    log: VerifierLogLevel,
) -> Result<Ebpf, EbpfProgramsError> {
    open_object(object, paths, features, log).map(|opened| opened.ebpf)
}

/// Returns the path of the map that the activator puts its one listener for all services' ports into, where maps have
/// the default sizes.
pub fn ports_map(bpffs: &Path) -> PathBuf {
    bpffs.join(format!("v{}", abi::ABI_VERSION)).join(maps::PORTS)
}

/// Removes the pins of all versions below `bpffs`, each in a folder of its own. Programs are detached when it returns;
/// maps end with their last user.
pub fn remove_pins(bpffs: &Path) -> Result<(), EbpfProgramsError> {
    versions::folders_in(bpffs).iter().try_for_each(|pins| versions::remove_all(pins))
}

fn make_folder(path: &Path) -> Result<(), EbpfProgramsError> {
    fs::create_dir_all(path).map_err(|source| path_error("make folder", path, source))
}

fn open_folder(path: &Path) -> Result<File, EbpfProgramsError> {
    File::open(path).map_err(|source| path_error("open cgroup", path, source))
}

/// Returns the number of foreign programs that redirect connects in the cgroup `lowest` or above it, by owner. `own`
/// has the cgroups that the agent attaches its programs to.
pub(crate) fn count_foreign_programs(
    lowest: &Path,
    own: &[&Path],
) -> BTreeMap<ForeignProgramOwner, usize> {
    let mut counts = BTreeMap::new();
    for cgroup in lowest.ancestors().take_while(|it| it.join("cgroup.procs").exists()) {
        // The agent's own programs are attached to these cgroups, by the same names.
        let has_own_programs = own.contains(&cgroup);
        for (name, attach_type, _) in
            CGROUP_PROGRAMS.into_iter().filter(|it| CONNECT_PROGRAMS.contains(&it.0))
        {
            let Ok(folder) = File::open(cgroup) else { continue };
            // Only for information: a hook that cannot be read counts as empty.
            let names = sys::attached_programs(folder.as_fd(), attach_type).unwrap_or_default();
            let foreign = names.iter().filter(|it| !(has_own_programs && it.as_str() == name));
            foreign.for_each(|it| {
                *counts.entry(ForeignProgramOwner::from_program_name(it)).or_default() += 1
            });
        }
    }
    counts
}

/// Returns the inodes of the cgroups above this one.
fn cgroups_above(cgroup: &Path) -> impl Iterator<Item = u64> {
    let above = cgroup.ancestors().skip(1).take_while(|it| it.join("cgroup.procs").exists());
    above.filter_map(|it| Some(fs::metadata(it).ok()?.ino()))
}

/// Opens a network namespace. Returns it with its inode.
fn open_netns(path: &Path) -> Result<(File, u64), EbpfProgramsError> {
    let failed = |source| path_error("use network namespace", path, source);
    let file = File::open(path).map_err(failed)?;
    let inode = file.metadata().map_err(failed)?.ino();
    Ok((file, inode))
}

fn path_error(attempt: &'static str, path: &Path, source: io::Error) -> EbpfProgramsError {
    EbpfProgramsError::Path { attempt, path: path.to_owned(), source }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map_sizes::MapSizes;

    #[test]
    fn pins_are_named_after_the_version_and_sizes_that_are_not_the_default_ones() {
        let (bpffs, clients, pods) = ("/b".into(), "/c".into(), "/c/p".into());
        let map_sizes = MapSizes::default();
        let version = abi::ABI_VERSION;
        let paths = AgentPaths { bpffs, clients, pods, kubelet: None, version, map_sizes };
        assert_eq!(paths.pins(), Path::new("/b").join(format!("v{version}")));
        assert_eq!(ports_map(&paths.bpffs), paths.pins().join(maps::PORTS));
        let sized = AgentPaths { map_sizes: MapSizes { backends: 300, ..map_sizes }, ..paths };
        let name = format!("v{version}-32768-300-131072-8192-16384");
        assert_eq!(sized.pins(), Path::new("/b").join(name));
    }
}
