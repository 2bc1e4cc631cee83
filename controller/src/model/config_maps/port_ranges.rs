//! Pure: sets of ports, written as single ports and ranges.

use std::{num::NonZeroU16, ops::RangeInclusive};

use common::decimal::parse_port;
use datapath::abi::ACTIVATOR_PORTS;

/// Ports that no service gets: those of HTTP and HTTPS at the gateway, and those on which activators listen for
/// anything else.
const RESERVED_PORTS: [u16; 7] = [80, 443, 7103, 7120, 8012, 8080, 8443];

/// Returns true if no service may have this gateway port. `activator_ports` are the first and the last port for names at
/// the activators.
pub fn is_reserved_gateway_port(port: NonZeroU16, activator_ports: (u16, u16)) -> bool {
    let (first, last) = activator_ports;
    RESERVED_PORTS.contains(&port.get()) || (first..=last).contains(&port.get())
}

/// Parses a port that a gateway is to open for a service.
///
/// # Errors
/// The text is no port, or no service may have the port.
pub fn parse_gateway_port(text: &str) -> Result<NonZeroU16, String> {
    let port = parse_port(text).ok_or("use a port, 1 to 65535")?;
    match is_reserved_gateway_port(port, ACTIVATOR_PORTS.into()) {
        true => Err("it is one of the activators' own ports".to_owned()),
        false => Ok(port),
    }
}

/// Set of ports.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PortRanges(Vec<RangeInclusive<u16>>);

impl PortRanges {
    /// Parses entries of the forms `5432` and `6000-6100`. The error is the first entry that has neither.
    pub fn parse<'a>(entries: impl IntoIterator<Item = &'a str>) -> Result<Self, String> {
        let range = |entry: &'a str| parse_range(entry).ok_or_else(|| entry.to_owned());
        entries.into_iter().map(range).collect::<Result<Vec<_>, _>>().map(Self)
    }

    /// Returns true if the port is in the set.
    pub fn contains(&self, port: NonZeroU16) -> bool {
        self.0.iter().any(|range| range.contains(&port.get()))
    }
}

impl FromIterator<NonZeroU16> for PortRanges {
    fn from_iter<I: IntoIterator<Item = NonZeroU16>>(ports: I) -> Self {
        Self(ports.into_iter().map(|port| port.get()..=port.get()).collect())
    }
}

fn parse_range(entry: &str) -> Option<RangeInclusive<u16>> {
    let port = |text: &str| parse_port(text.trim()).map(NonZeroU16::get);
    let (first, last) = entry.split_once('-').unwrap_or((entry, entry));
    let (first, last) = (port(first)?, port(last)?);
    (first <= last).then_some(first..=last)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contains(ports: &PortRanges, port: u16) -> bool {
        ports.contains(NonZeroU16::new(port).expect("a port"))
    }

    #[test]
    fn ports_and_ranges_are_read_with_their_ends() {
        let ports = PortRanges::parse(["5432", "6000-6100", "65535-65535"]).expect("good ports");
        for (port, is_in) in [
            (5431, false),
            (5432, true),
            (5433, false),
            (5999, false),
            (6000, true),
            (6100, true),
            (6101, false),
            (65_535, true),
        ] {
            assert_eq!(contains(&ports, port), is_in, "{port}");
        }
        assert!(!contains(&PortRanges::default(), 5432), "none by default");
        assert!(contains(&NonZeroU16::new(25).into_iter().collect(), 25));
    }

    #[test]
    fn a_gateway_opens_no_port_that_no_service_may_have() {
        let [first, last] = ACTIVATOR_PORTS;
        for reserved in RESERVED_PORTS.into_iter().chain([first, last]) {
            let refusal = parse_gateway_port(&reserved.to_string()).expect_err("reserved");
            assert_eq!(refusal, "it is one of the activators' own ports");
        }
        for good in [first - 1, last + 1, 5432] {
            assert_eq!(parse_gateway_port(&good.to_string()).map(NonZeroU16::get), Ok(good));
        }
        for bad in ["0", "+25", "65536", "http"] {
            assert_eq!(parse_gateway_port(bad), Err("use a port, 1 to 65535".to_owned()));
        }
    }

    #[test]
    fn an_entry_that_is_no_range_is_named() {
        for bad in
            ["0", "65536", "a", "", "-", "1-", "-1", "2-1", "0-5", "1-2-3", "5432/TCP", "+80"]
        {
            assert_eq!(PortRanges::parse(["5432", bad]), Err(bad.to_owned()));
        }
    }
}
