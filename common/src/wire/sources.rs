//! Pure: addresses of clients that may send requests to a Revision's pods.

use std::{collections::BTreeSet, net::IpAddr};

use ipnet::IpNet;

use super::{WireError, raw};

/// Addresses that may send requests to a Revision's pods, as NetworkPolicies select them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct AllowedSources {
    /// Single addresses, which are those of selected pods.
    pub addresses: BTreeSet<IpAddr>,
    /// Networks from `ipBlock` rules.
    pub ip_blocks: Vec<IpBlock>,
}

/// Network with exceptions (`ipBlock` of a NetworkPolicy).
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct IpBlock {
    /// Network whose addresses are allowed.
    pub network: IpNet,
    /// Subnets of `network` that are not allowed.
    pub exceptions: Vec<IpNet>,
}

impl AllowedSources {
    /// Returns true if a client with this address may send requests.
    pub fn contains(&self, client: IpAddr) -> bool {
        // A socket of both families reports an IPv4 client as an IPv4-mapped address.
        let client = client.to_canonical();
        let within = |block: &IpBlock| {
            block.network.contains(&client)
                && !block.exceptions.iter().any(|it| it.contains(&client))
        };
        self.addresses.contains(&client) || self.ip_blocks.iter().any(within)
    }
}

fn parse_source_network(text: &str) -> Result<IpNet, WireError> {
    let error = || WireError::new("source.net", text, "must be ADDRESS/LENGTH");
    text.parse().ok().ok_or_else(error)
}

impl TryFrom<raw::Sources> for AllowedSources {
    type Error = WireError;
    fn try_from(message: raw::Sources) -> Result<Self, WireError> {
        let address = |text: String| match text.parse::<IpAddr>() {
            Ok(address) => Ok(address.to_canonical()),
            Err(_) => Err(WireError::new("source.address", text, "must be an IP address")),
        };
        let block = |message: raw::SourceBlock| {
            let exceptions = message
                .except
                .iter()
                .map(|text| parse_source_network(text))
                .collect::<Result<_, _>>()?;
            Ok(IpBlock { network: parse_source_network(&message.net)?, exceptions })
        };
        Ok(Self {
            addresses: message.addresses.into_iter().map(address).collect::<Result<_, _>>()?,
            ip_blocks: message.blocks.into_iter().map(block).collect::<Result<_, WireError>>()?,
        })
    }
}

impl From<&AllowedSources> for raw::Sources {
    fn from(value: &AllowedSources) -> Self {
        let block = |value: &IpBlock| raw::SourceBlock {
            net: value.network.to_string(),
            except: value.exceptions.iter().map(ToString::to_string).collect(),
        };
        Self {
            addresses: value.addresses.iter().map(ToString::to_string).collect(),
            blocks: value.ip_blocks.iter().map(block).collect(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sources(addresses: &[&str], blocks: &[(&str, &[&str])]) -> raw::Sources {
        let texts = |all: &[&str]| all.iter().map(ToString::to_string).collect();
        let block = |(net, except): &(&str, &[&str])| raw::SourceBlock {
            net: net.to_string(),
            except: texts(except),
        };
        raw::Sources { addresses: texts(addresses), blocks: blocks.iter().map(block).collect() }
    }

    #[test]
    fn a_client_is_let_in_by_its_address_or_its_network() {
        let blocks: [(&str, &[&str]); 2] =
            [("10.1.0.0/16", &["10.1.2.0/24"]), ("fd00:1::/32", &[])];
        let it =
            AllowedSources::try_from(sources(&["10.9.0.7"], &blocks)).expect("it is well formed");
        let may = |client: &str| it.contains(client.parse().expect("an address"));
        assert!(may("10.9.0.7") && may("::ffff:10.9.0.7"), "as a socket of both families has it");
        assert!(may("10.1.1.1") && may("fd00:1::7"));
        assert!(!may("10.1.2.3"), "a hole in the network");
        assert!(!may("10.9.0.8") && !may("fd00:2::7"));
        assert!(!AllowedSources::default().contains([10, 0, 0, 1].into()), "nobody");
        assert_eq!(AllowedSources::try_from(raw::Sources::from(&it)).expect("as it was"), it);
    }

    #[test]
    fn what_is_no_address_is_refused() {
        let error_of = |it: raw::Sources| {
            AllowedSources::try_from(it).expect_err("it is malformed").to_string()
        };
        assert!(error_of(sources(&["10.0.0"], &[])).contains("must be an IP address"));
        assert!(error_of(sources(&[], &[("10.0.0.0/33", &[])])).contains("ADDRESS/LENGTH"));
        assert!(error_of(sources(&[], &[("10.0.0.0/8", &["x"])])).contains("ADDRESS/LENGTH"));
    }
}
