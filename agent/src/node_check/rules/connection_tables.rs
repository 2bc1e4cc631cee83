//! Pure: connection tables of a node's pods → the line of `rouse check` about them.

use super::CheckLine;

/// Number of buckets up to which a connection table is small: a walk over it takes 0.15 ms.
const SMALL_TABLE_ENTRIES: u64 = 16_384;
/// Advice for a node whose pods share a large connection table, with its side effects.
const OWN_TABLES_ADVICE: &str = "set net.ipv4.tcp_child_ehash_entries=16384 in /etc/sysctl.d before pods start: \
    lists of a pod's connections then take 0.15 ms instead of several; it takes 128 KiB for each pod, and lowers \
    its tcp_max_tw_buckets to 8192 and its tcp_max_syn_backlog to 128";

/// Connection tables that the network namespaces of a node's pods have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ConnectionTables {
    /// All pods share the machine's table, because the kernel is older than Linux 6.1.
    OnlyShared,
    /// The kernel can give pods tables of their own.
    Configurable {
        /// Number of buckets in the table that the node itself uses. It is the machine's, unless the node is a
        /// container with a table of its own, which does not see the machine's.
        node_entries: u64,
        /// Number of buckets in the tables of pods that start from now on; 0: they share the machine's table. The
        /// kernel rounds the number up to a power of two.
        child_entries: u64,
    },
    /// The settings could not be read, for this reason.
    Unknown(String),
}

/// Describes the connection tables of pods. No state of them is a fault: with large tables, lists of connections only
/// take longer.
pub(super) fn check_connection_tables(tables: &ConnectionTables) -> CheckLine {
    let finding = match tables {
        ConnectionTables::OnlyShared => {
            "pods share the machine's; Linux 6.1 and newer can give them their own".to_owned()
        }
        ConnectionTables::Configurable { child_entries: 0, node_entries } => {
            let finding = format!("pods share the machine's, of {node_entries} buckets");
            match *node_entries > SMALL_TABLE_ENTRIES {
                true => format!("{finding}; {OWN_TABLES_ADVICE}"),
                false => finding,
            }
        }
        ConnectionTables::Configurable { child_entries, .. } => {
            // The kernel rounds the setting up in this way.
            let entries = child_entries.next_power_of_two();
            format!("pods that start get their own, of {entries} buckets")
        }
        ConnectionTables::Unknown(reason) => format!("not known: {reason}"),
    };
    CheckLine::fine("connection tables", finding)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn connection_tables_are_no_fault_and_large_shared_ones_get_an_advice() {
        let configurable = |node_entries, child_entries| ConnectionTables::Configurable {
            node_entries,
            child_entries,
        };
        let cases = [
            (configurable(262_144, 0), "pods share the machine's, of 262144 buckets", true),
            (configurable(16_385, 0), "pods share the machine's, of 16385 buckets", true),
            (configurable(16_384, 0), "pods share the machine's, of 16384 buckets", false),
            (configurable(262_144, 8_192), "pods that start get their own, of 8192 buckets", false),
            (configurable(16_384, 9_000), "pods that start get their own, of 16384 buckets", false),
            (ConnectionTables::OnlyShared, "pods share the machine's; Linux 6.1 and newer", false),
            (ConnectionTables::Unknown("denied".into()), "not known: denied", false),
        ];
        for (tables, finding, has_advice) in cases {
            let line = check_connection_tables(&tables);
            assert_eq!(line.to_do, None, "{line}");
            assert!(line.finding.starts_with(finding), "{line}");
            assert_eq!(line.finding.contains(OWN_TABLES_ADVICE), has_advice, "{line}");
        }
    }
}
