//! Pure: sizes of the kernel's maps that an installation chooses.
//!
//! The kernel creates a map with its size. So maps of other sizes are pinned in another folder, and the agent takes
//! over from those in force as it does from another ABI version.

use std::{collections::BTreeMap, fmt, str::FromStr};

use datapath::abi::{self, maps};

/// Sizes of the kernel's maps, in entries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MapSizes {
    /// Frontends: addresses and ports of services.
    pub frontends: u32,
    /// Different backends of all lists.
    pub backends: u32,
    /// Entries of all lists, in use or in quarantine.
    pub list_entries: u32,
    /// Connect records of client sockets in rows, a power of two. Further sockets have records in memory of their own.
    pub connect_records: u32,
    /// Clients that keep a backend, each counted once for every frontend.
    pub affinity_clients: u32,
}

/// Size that an installation may choose.
#[derive(Clone, Copy, Debug)]
struct MapSizeSetting {
    /// Name in `--map-sizes`.
    name: &'static str,
    /// Highest size. The lowest is [`MIN_SIZE`].
    max: u32,
    /// Maps whose size it sets, or whose size follows from it.
    maps: &'static [&'static str],
    field: fn(&mut MapSizes) -> &mut u32,
}

/// Lowest size of each map.
const MIN_SIZE: u32 = 256;

/// Settings in the order of the fields.
const SETTINGS: [MapSizeSetting; 5] = [
    MapSizeSetting {
        name: "frontends",
        max: 1 << 20,
        maps: &[maps::FRONTENDS, maps::SVC_STATE, maps::SVC_INFO],
        field: |sizes| &mut sizes.frontends,
    },
    MapSizeSetting {
        name: "backends",
        // A list has each backend once, and 20 bits for its length.
        max: (1 << 20) - 1,
        maps: &[maps::BACKENDS],
        field: |sizes| &mut sizes.backends,
    },
    MapSizeSetting {
        name: "list-entries",
        // A list has 24 bits for its offset.
        max: 1 << 24,
        maps: &[maps::SLOTS],
        field: |sizes| &mut sizes.list_entries,
    },
    MapSizeSetting {
        name: CONNECT_RECORDS,
        max: 1 << 20,
        maps: &[maps::CLIENTS, maps::CLAIMS],
        field: |sizes| &mut sizes.connect_records,
    },
    MapSizeSetting {
        name: "affinity-clients",
        max: 1 << 20,
        maps: &[maps::AFFINITY],
        field: |sizes| &mut sizes.affinity_clients,
    },
];

/// Name of the setting whose size must be a power of two.
const CONNECT_RECORDS: &str = "connect-records";

impl Default for MapSizes {
    /// Sizes for Rouse's own services, and for Services of the cluster with a label.
    fn default() -> Self {
        Self {
            frontends: abi::FRONTENDS_MAX,
            backends: abi::BACKENDS_MAX,
            list_entries: abi::SLOTS_MAX,
            connect_records: abi::CLIENTS_MAX,
            affinity_clients: abi::AFFINITY_MAX,
        }
    }
}

impl MapSizes {
    /// Sizes for all Services of a cluster: 10,000 of them with ten endpoints each, in several ports and families, need
    /// less than half.
    pub const WHOLE_CLUSTER: Self = Self {
        frontends: 131_072,
        backends: 262_144,
        list_entries: 1_048_576,
        connect_records: 65_536,
        affinity_clients: 65_536,
    };

    /// Returns the number of service ids: one for each frontend, the two activator lists, and some in quarantine.
    pub const fn service_ids(self) -> u32 {
        self.frontends + self.frontends / 4
    }

    /// Returns what a folder of pins with these sizes has behind its version: nothing for the default sizes.
    pub fn pins_suffix(mut self) -> String {
        if self == Self::default() {
            return String::new();
        }
        let sizes = SETTINGS.map(|setting| (setting.field)(&mut self).to_string());
        format!("-{}", sizes.join("-"))
    }
}

/// Returns the name in `--map-sizes` of the setting that a map's size follows.
pub fn setting_of(map: &str) -> Option<&'static str> {
    SETTINGS.iter().find(|setting| setting.maps.contains(&map)).map(|setting| setting.name)
}

/// Sizes that differ from those of the mode: the value of `--map-sizes`, such as `frontends=65536,backends=65536`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MapSizeOverrides(BTreeMap<&'static str, u32>);

/// Error of a value of `--map-sizes`, with the part that is wrong and the rule that it breaks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{part:?}: {rule}")]
pub struct MapSizeError {
    part: String,
    rule: String,
}

impl MapSizeOverrides {
    /// Returns true if all sizes are those of the mode.
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the sizes of a mode with these instead of its own.
    pub fn apply_to(&self, mut sizes: MapSizes) -> MapSizes {
        for setting in &SETTINGS {
            if let Some(&size) = self.0.get(setting.name) {
                *(setting.field)(&mut sizes) = size;
            }
        }
        sizes
    }
}

impl FromStr for MapSizeOverrides {
    type Err = MapSizeError;

    fn from_str(text: &str) -> Result<Self, MapSizeError> {
        let mut sizes = BTreeMap::new();
        for part in text.split(',').map(str::trim).filter(|part| !part.is_empty()) {
            let (name, size) =
                parse_part(part).map_err(|rule| MapSizeError { part: part.to_owned(), rule })?;
            if sizes.insert(name, size).is_some() {
                let rule = format!("{name} must occur once");
                return Err(MapSizeError { part: part.to_owned(), rule });
            }
        }
        Ok(Self(sizes))
    }
}

/// Parses `NAME=SIZE`. An error is the rule that it breaks.
fn parse_part(part: &str) -> Result<(&'static str, u32), String> {
    let (name, size) = part.split_once('=').ok_or("must be NAME=SIZE")?;
    let setting = SETTINGS.iter().find(|setting| setting.name == name).ok_or_else(|| {
        let names = SETTINGS.map(|setting| setting.name).join(", ");
        format!("the name must be one of {names}")
    })?;
    let range = MIN_SIZE..=setting.max;
    let size =
        size.parse::<u32>().ok().filter(|size| range.contains(size)).ok_or_else(|| {
            format!("the size must be a number from {MIN_SIZE} to {}", setting.max)
        })?;
    // The programs find the row of a socket by a mask of its cookie.
    if setting.name == CONNECT_RECORDS && !size.is_power_of_two() {
        return Err("the size must be a power of two".to_owned());
    }
    Ok((setting.name, size))
}

impl fmt::Display for MapSizeOverrides {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let parts: Vec<String> =
            self.0.iter().map(|(name, size)| format!("{name}={size}")).collect();
        out.write_str(&parts.join(","))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    fn parse(text: &str) -> Result<MapSizeOverrides, String> {
        text.parse().map_err(|error: MapSizeError| error.to_string())
    }

    #[test]
    fn given_sizes_take_the_place_of_the_modes() {
        let sizes = parse("backends=65536, connect-records=1024,").expect("known names");
        let expected =
            MapSizes { backends: 65_536, connect_records: 1_024, ..MapSizes::WHOLE_CLUSTER };
        assert_eq!(sizes.apply_to(MapSizes::WHOLE_CLUSTER), expected);
        assert_eq!(parse(&sizes.to_string()), Ok(sizes));
        assert_eq!(parse("").map(|it| it.is_empty()), Ok(true));
    }

    #[test]
    fn a_wrong_size_is_refused_with_what_would_do() {
        let cases = [
            ("frontends", "\"frontends\": must be NAME=SIZE"),
            ("slots=300", "\"slots=300\": the name must be one of frontends, backends, list-"),
            ("backends=255", "\"backends=255\": the size must be a number from 256 to 1048575"),
            ("backends=1048576", "\"backends=1048576\": the size must be a number from 256 to"),
            ("list-entries=many", "\"list-entries=many\": the size must be a number"),
            ("connect-records=1000", "\"connect-records=1000\": the size must be a power of two"),
            ("backends=300,backends=300", "\"backends=300\": backends must occur once"),
        ];
        for (text, begins) in cases {
            let refused = parse(text).expect_err(text);
            assert!(refused.starts_with(begins), "{refused}");
        }
    }

    #[test]
    fn pins_of_different_sizes_are_in_different_folders() {
        assert_eq!(MapSizes::default().pins_suffix(), "", "maps of earlier agents stay in use");
        let changed = SETTINGS.map(|setting| {
            let mut sizes = MapSizes::default();
            *(setting.field)(&mut sizes) *= 2;
            sizes.pins_suffix()
        });
        let suffixes: BTreeSet<&String> = changed.iter().collect();
        assert_eq!(suffixes.len(), SETTINGS.len(), "{changed:?}");
        assert_eq!(MapSizes::WHOLE_CLUSTER.pins_suffix(), "-131072-262144-1048576-65536-65536");
    }

    #[test]
    fn each_map_has_one_setting() {
        assert_eq!(setting_of(maps::SVC_STATE), Some("frontends"));
        assert_eq!(setting_of(maps::SLOTS), Some("list-entries"));
        assert_eq!(setting_of(maps::LISTEN), None, "its size is fixed");
        let all: Vec<&str> = SETTINGS.iter().flat_map(|setting| setting.maps).copied().collect();
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len());
    }

    #[test]
    fn words_of_the_kernel_hold_the_largest_offset_and_length() {
        use datapath::load_balancing::{RoutingMode, SvcState};
        let mut sizes = MapSizes::default();
        SETTINGS.iter().for_each(|setting| *(setting.field)(&mut sizes) = setting.max);
        let state = SvcState {
            offset: sizes.list_entries - 1,
            count: sizes.backends,
            generation: 1,
            mode: RoutingMode::PickRandom,
        };
        assert_eq!(SvcState::unpack(state.pack()), state);
    }
}
