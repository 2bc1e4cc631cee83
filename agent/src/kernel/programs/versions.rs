//! Shell: pins of other versions: the version in force, and the programs that still serve its connections. Programs of
//! this version with maps of other sizes are another version here.

use std::{
    fs, io,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
};

use datapath::abi::maps;
use tracing::{info, warn};

use super::{CONNECT_PROGRAMS, EbpfProgramsError, path_error};
use crate::kernel::{maps as tables, sys};
use crate::paths::AgentPaths;

/// Programs that serve a client's socket for as long as it is open.
pub(super) const CLIENT_SOCKET_PROGRAMS: [&str; 5] =
    ["release", "getpeername4", "getpeername6", "recvmsg4", "recvmsg6"];
/// Maps that a retired version keeps while such sockets are open. They show which sockets that are, and to which
/// endpoints they were led.
const RETIRED_VERSION_MAPS: [&str; 5] =
    [maps::CLAIMS, maps::CLIENTS, maps::OVERFLOW_COPIES, maps::CONTROL, maps::UDP_SOCKETS];

/// All maps that these programs use. If any of them is not pinned, the version was retired.
const CLIENT_PROGRAM_MAPS: [&str; 10] = [
    maps::CLAIMS,
    maps::CLIENTS,
    maps::OVERFLOW,
    maps::OVERFLOW_COPIES,
    maps::BOUND_CONNECTS,
    maps::BOUND_SOCKETS,
    maps::BACKENDS,
    maps::CONTROL,
    maps::UDP_REPLIES,
    maps::UDP_SOCKETS,
];

/// Returns the pins of another version in force, which has counting programs: one that connects follow, or else the
/// newest one.
pub(super) fn version_in_force(paths: &AgentPaths) -> Option<PathBuf> {
    let in_force = |(_, path): &(u32, PathBuf)| {
        path.join(maps::CONNS).exists() && path.join("links/sockets").exists()
    };
    // A newer version without connect programs has not taken over: its agent has ended before.
    let rank = |(version, path): &(u32, PathBuf)| (has_any_link(path, &CONNECT_PROGRAMS), *version);
    other_versions(paths).filter(in_force).max_by_key(rank).map(|(_, path)| path)
}

/// Returns the pins of other versions, with their version numbers.
fn other_versions(paths: &AgentPaths) -> impl Iterator<Item = (u32, PathBuf)> {
    let own_pins = paths.pins();
    let entries = fs::read_dir(&paths.bpffs).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let version = version_of(entry.file_name().to_str()?)?;
        (entry.path() != own_pins).then(|| (version, entry.path()))
    })
}

/// Returns the version of a folder of pins by its name, such as `v6`, or `v6-` and the sizes of its maps.
pub(super) fn version_of(name: &str) -> Option<u32> {
    let version = name.strip_prefix('v')?;
    version.split_once('-').map_or(version, |(version, _)| version).parse().ok()
}

/// Moves pins aside that were retired and have open client sockets, so that their programs keep the maps of these
/// sockets, and new programs get maps of their own. Pins that are complete, or of which nothing is left, stay.
pub(super) fn set_aside_outlived(pins: &Path) -> Result<(), EbpfProgramsError> {
    let has_all_maps = CLIENT_PROGRAM_MAPS.iter().all(|name| pins.join(name).exists());
    if has_all_maps || !has_any_link(pins, &CLIENT_SOCKET_PROGRAMS) {
        return Ok(());
    }
    let name = pins.file_name().unwrap_or_default().to_string_lossy();
    let mut free = (1..).map(|number| pins.with_file_name(format!("{name}-outlived-{number}")));
    let aside = free.find(|path| !path.exists()).expect("numbers without end");
    fs::rename(pins, &aside).map_err(|source| path_error("rename", pins, source))?;
    info!(pins = %aside.display(), "earlier programs set aside until their clients' sockets close");
    Ok(())
}

/// Retires all other versions but `keep`. Returns the pins of those whose clients' sockets are still open.
pub(super) fn retire_other_versions(paths: &AgentPaths, keep: Option<&Path>) -> Vec<PathBuf> {
    let retired = other_versions(paths).filter(|(_, path)| Some(path.as_path()) != keep);
    retired.filter(|(_, pins)| retire_or_keep(pins)).map(|(_, pins)| pins).collect()
}

/// Retires another version. Returns true if its pins stay; an error is logged, and they stay.
pub(super) fn retire_or_keep(pins: &Path) -> bool {
    retire(pins).unwrap_or_else(|error| {
        let error = common::link::error_chain(&error);
        warn!(pins = %pins.display(), error, "cannot remove old pins");
        true
    })
}

/// Retires another version: detaches its programs and removes its pins. Returns true if the programs that serve open
/// client sockets stay.
pub(super) fn retire(pins: &Path) -> Result<bool, EbpfProgramsError> {
    // Checked before anything is removed: the maps that show it are among the pins.
    let has_clients =
        has_any_link(pins, &CLIENT_SOCKET_PROGRAMS) && tables::has_client_sockets(pins)?;
    if !has_clients {
        remove_all(pins)?;
        info!(pins = %pins.display(), "pins of another version removed");
        return Ok(false);
    }
    // Links first: their removal detaches the programs, and only then the maps may go.
    let links = names_in(&pins.join("links"));
    links
        .iter()
        .filter(|it| !CLIENT_SOCKET_PROGRAMS.contains(&it.as_str()))
        .try_for_each(|it| remove_link(pins, it))?;
    let is_spare =
        |name: &&String| name.as_str() != "links" && !RETIRED_VERSION_MAPS.contains(&name.as_str());
    for name in names_in(pins).iter().filter(is_spare) {
        remove_pin(&pins.join(name))?;
    }
    Ok(true)
}

/// Returns true if any of these links is pinned there.
pub(super) fn has_any_link(pins: &Path, links: &[&str]) -> bool {
    links.iter().any(|name| pins.join("links").join(name).exists())
}

fn names_in(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

/// Returns the folders in a folder.
pub(super) fn folders_in(folder: &Path) -> Vec<PathBuf> {
    let paths = names_in(folder).into_iter().map(|name| folder.join(name));
    paths.filter(|path| path.is_dir()).collect()
}

/// Removes the folder of one version's pins. Its programs are detached first.
pub(super) fn remove_all(pins: &Path) -> Result<(), EbpfProgramsError> {
    remove_links(pins)?;
    match fs::remove_dir_all(pins) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(path_error("remove", pins, source))
        }
        _ => Ok(()),
    }
}

/// Detaches the programs of all links below `pins` and removes the links' pins.
pub(super) fn remove_links(pins: &Path) -> Result<(), EbpfProgramsError> {
    names_in(&pins.join("links")).iter().try_for_each(|it| remove_link(pins, it))
}

/// Detaches the program of a link and removes the link's pin. Afterwards the kernel begins no more run of the program;
/// after the removal of the pin alone it does so for a moment.
pub(super) fn remove_link(pins: &Path, name: &str) -> Result<(), EbpfProgramsError> {
    let pin = pins.join("links").join(name);
    if let Ok(link) = sys::open_pin(&pin) {
        match sys::link_detach(link.as_fd()) {
            // Links of this kind end with their pin only.
            Err(source) if source.raw_os_error() == Some(libc::EOPNOTSUPP) => {}
            Err(source) => return Err(path_error("detach link", &pin, source)),
            Ok(()) => {}
        }
    }
    remove_pin(&pin)
}

pub(super) fn remove_pin(pin: &Path) -> Result<(), EbpfProgramsError> {
    match fs::remove_file(pin) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(path_error("remove", pin, source))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn folders_of_pins_are_known_by_their_names() {
        let versions = ["v6", "v6-300-300-300-256-300", "v7-outlived-1", "v", "v6x", "links", "6"];
        let known: Vec<u32> = versions.into_iter().filter_map(version_of).collect();
        assert_eq!(known, [6, 6, 7]);
    }

    #[test]
    fn only_retired_pins_with_client_programs_are_set_aside() {
        let folder = std::env::temp_dir().join(format!("rouse-aside-{}", std::process::id()));
        let _none = fs::remove_dir_all(&folder);
        let pins = folder.join("v6");
        let touch = |path: PathBuf| fs::write(path, "").expect("writable");
        set_aside_outlived(&pins).expect("there is nothing");
        fs::create_dir_all(pins.join("links")).expect("writable");
        touch(pins.join(maps::CLAIMS));
        set_aside_outlived(&pins).expect("no socket is served");
        assert!(pins.exists());
        for number in 1..=2 {
            fs::create_dir_all(pins.join("links")).expect("writable");
            touch(pins.join("links/release"));
            set_aside_outlived(&pins).expect("renamed");
            assert!(!pins.exists());
            assert!(folder.join(format!("v6-outlived-{number}/links/release")).exists());
        }
        fs::create_dir_all(pins.join("links")).expect("writable");
        touch(pins.join("links/release"));
        CLIENT_PROGRAM_MAPS.iter().for_each(|name| touch(pins.join(name)));
        set_aside_outlived(&pins).expect("complete");
        assert!(pins.join("links/release").exists());
        // An agent that ended while it retired these pins may have removed any one of the maps.
        for (number, name) in (3..).zip([maps::UDP_SOCKETS, maps::UDP_REPLIES, maps::CLIENTS]) {
            CLIENT_PROGRAM_MAPS.iter().for_each(|name| touch(pins.join(name)));
            fs::remove_file(pins.join(name)).expect("it is there");
            set_aside_outlived(&pins).expect("renamed");
            assert!(folder.join(format!("v6-outlived-{number}/links/release")).exists(), "{name}");
            fs::create_dir_all(pins.join("links")).expect("writable");
            touch(pins.join("links/release"));
        }
        fs::remove_dir_all(folder).expect("removed");
    }
}
