//! Shell: pins of other versions: which are in force, and what of them still serves connections that they began.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use common::abi::maps;
use tracing::{info, warn};

use super::{Error, Places, place};
use crate::maps as tables;

/// The programs that serve a client's socket for as long as it is open.
const CLIENT_SIDE: [&str; 3] = ["release", "getpeername4", "getpeername6"];
/// What tells whether such sockets are open.
const CLIENT_MAPS: [&str; 2] = [maps::CLAIMS, maps::CONTROL];

/// Pins of another version that are in force: the newest one's that has counting programs.
pub(super) fn other_version(places: &Places) -> Option<PathBuf> {
    let in_force =
        |path: &PathBuf| path.join(maps::CONNS).exists() && path.join("links/sockets").exists();
    other_versions(places).filter(|(_, path)| in_force(path)).max().map(|(_, path)| path)
}

/// Pins of other versions, with their numbers.
fn other_versions(places: &Places) -> impl Iterator<Item = (u32, PathBuf)> {
    let own = places.version;
    let found = fs::read_dir(&places.bpffs).into_iter().flatten().flatten();
    found.filter_map(move |entry| {
        let version = entry.file_name().to_str()?.strip_prefix('v')?.parse().ok()?;
        (version != own).then(|| (version, entry.path()))
    })
}

/// Takes away what agents of other versions left in force, but `keep`. Returns the pins of those whose clients' sockets are
/// still open.
pub(super) fn retire_others(places: &Places, keep: Option<&Path>) -> Vec<PathBuf> {
    let others = other_versions(places).filter(|(_, path)| Some(path.as_path()) != keep);
    others.filter(|(_, pins)| stays(pins)).map(|(_, pins)| pins).collect()
}

/// As [`retire`], with an error said instead.
pub(super) fn stays(pins: &Path) -> bool {
    retire(pins).unwrap_or_else(|error| {
        let error = common::link::chain(&error);
        warn!(pins = %pins.display(), error, "cannot remove old pins");
        true
    })
}

/// Takes another version's programs out of force. Returns whether those that serve clients' sockets stay, as such sockets
/// are open.
pub(super) fn retire(pins: &Path) -> Result<bool, Error> {
    let has_clients = has_any(pins, &CLIENT_SIDE) && tables::has_clients(pins)?;
    if !has_clients {
        return match fs::remove_dir_all(pins) {
            Err(source) if source.kind() != io::ErrorKind::NotFound => {
                Err(place("remove", pins, source))
            }
            _ => {
                info!(pins = %pins.display(), "pins of another version removed");
                Ok(false)
            }
        };
    }
    let links = names_in(&pins.join("links"));
    links
        .iter()
        .filter(|it| !CLIENT_SIDE.contains(&it.as_str()))
        .try_for_each(|it| remove_link(pins, it))?;
    let is_spare =
        |name: &&String| name.as_str() != "links" && !CLIENT_MAPS.contains(&name.as_str());
    for name in names_in(pins).iter().filter(is_spare) {
        remove_pin(&pins.join(name))?;
    }
    Ok(true)
}

/// Whether any of these links is pinned there.
pub(super) fn has_any(pins: &Path, links: &[&str]) -> bool {
    links.iter().any(|name| pins.join("links").join(name).exists())
}

fn names_in(folder: &Path) -> Vec<String> {
    let found = fs::read_dir(folder).into_iter().flatten().flatten();
    found.filter_map(|entry| entry.file_name().into_string().ok()).collect()
}

pub(super) fn remove_link(pins: &Path, name: &str) -> Result<(), Error> {
    remove_pin(&pins.join("links").join(name))
}

pub(super) fn remove_pin(pin: &Path) -> Result<(), Error> {
    match fs::remove_file(pin) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(place("remove", pin, source))
        }
        _ => Ok(()),
    }
}

/// Takes everything of other versions out of force.
pub(super) fn remove_others(places: &Places) {
    for (_, other) in other_versions(places) {
        if let Err(error) = fs::remove_dir_all(&other) {
            warn!(pins = %other.display(), %error, "cannot remove old pins");
        }
    }
}
