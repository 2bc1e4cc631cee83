//! Shell: pins of other versions: the version in force, and the programs that still serve its connections.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use datapath::abi::maps;
use tracing::{info, warn};

use super::{EbpfProgramsError, path_error};
use crate::kernel::maps as tables;
use crate::paths::AgentPaths;

/// Programs that serve a client's socket for as long as it is open.
const CLIENT_SOCKET_PROGRAMS: [&str; 5] =
    ["release", "getpeername4", "getpeername6", "recvmsg4", "recvmsg6"];
/// Maps that show if such sockets are open.
const CLIENT_SOCKET_MAPS: [&str; 2] = [maps::CLAIMS, maps::CONTROL];

/// Returns the pins of another version in force: the newest one that has counting programs.
pub(super) fn version_in_force(paths: &AgentPaths) -> Option<PathBuf> {
    let in_force =
        |path: &PathBuf| path.join(maps::CONNS).exists() && path.join("links/sockets").exists();
    other_versions(paths).filter(|(_, path)| in_force(path)).max().map(|(_, path)| path)
}

/// Returns the pins of other versions, with their version numbers.
fn other_versions(paths: &AgentPaths) -> impl Iterator<Item = (u32, PathBuf)> {
    let own_version = paths.version;
    let entries = fs::read_dir(&paths.bpffs).into_iter().flatten().flatten();
    entries.filter_map(move |entry| {
        let version = entry.file_name().to_str()?.strip_prefix('v')?.parse().ok()?;
        (version != own_version).then(|| (version, entry.path()))
    })
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
        return match fs::remove_dir_all(pins) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(path_error("remove", pins, source))
            }
            _ => {
                info!(pins = %pins.display(), "pins of another version removed");
                Ok(false)
            }
        };
    }
    // Links first: their removal detaches the programs, and only then the maps may go.
    let links = names_in(&pins.join("links"));
    links
        .iter()
        .filter(|it| !CLIENT_SOCKET_PROGRAMS.contains(&it.as_str()))
        .try_for_each(|it| remove_link(pins, it))?;
    let is_spare =
        |name: &&String| name.as_str() != "links" && !CLIENT_SOCKET_MAPS.contains(&name.as_str());
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

pub(super) fn remove_link(pins: &Path, name: &str) -> Result<(), EbpfProgramsError> {
    remove_pin(&pins.join("links").join(name))
}

pub(super) fn remove_pin(pin: &Path) -> Result<(), EbpfProgramsError> {
    match fs::remove_file(pin) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(path_error("remove", pin, source))
        }
        _ => Ok(()),
    }
}

/// Detaches all programs of other versions, by removing their pins.
pub(super) fn remove_other_versions(paths: &AgentPaths) {
    for (_, other) in other_versions(paths) {
        if let Err(error) = fs::remove_dir_all(&other) {
            warn!(pins = %other.display(), %error, "cannot remove old pins");
        }
    }
}
