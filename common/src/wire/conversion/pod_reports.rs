//! Pure: conversion of reports on pods from protobuf to checked types and back.

use super::*;

impl TryFrom<raw::PodItem> for PodReportItem {
    type Error = WireError;
    fn try_from(message: raw::PodItem) -> WireResult<Self> {
        use raw::pod_item::What;
        Ok(match require("pod_item.what", message.what)? {
            What::Sender(message) => Self::Sender(message.try_into()?),
            What::Pod(message) => Self::Observed(message.try_into()?),
            What::Gone(uid) => Self::Removed(require_nonempty("pod_item.gone", uid)?),
            What::Applied(message) => Self::Applied(message.version),
            // Routed services share the message of draining pods: a new kind would be refused by earlier releases. The
            // order of these arms matters, since `*` parses as no name.
            What::Avoided(message) if message.names_awaited => Self::AwaitedServicesAnnounced,
            What::Avoided(message) if !message.passed_over.is_empty() => {
                if message.ended {
                    Self::PassedOverRemoved(message.passed_over)
                } else {
                    Self::PassedOver(message.passed_over)
                }
            }
            What::Avoided(message) if message.routed == ALL_ROUTED_SERVICES => {
                Self::RoutedServicesAnnounced
            }
            What::Avoided(message) if !message.routed.is_empty() => {
                let name = message.routed.parse()?;
                if message.ended {
                    Self::RoutedServiceRemoved(name)
                } else {
                    Self::RoutedService(name)
                }
            }
            What::Avoided(message) if message.ended => {
                Self::DrainAckRemoved(require_nonempty("avoided.uid", message.uid)?)
            }
            What::Avoided(message) => Self::DrainAck(require_nonempty("avoided.uid", message.uid)?),
            What::Synced(_) => Self::Synced,
        })
    }
}

impl From<PodReportItem> for raw::PodItem {
    fn from(value: PodReportItem) -> Self {
        use raw::pod_item::What;
        // Later kinds share the message of draining pods: earlier releases refuse a kind that they do not know.
        let what = match value {
            PodReportItem::Sender(value) => What::Sender(value.into()),
            PodReportItem::Observed(value) => What::Pod(value.into()),
            PodReportItem::Removed(uid) => What::Gone(uid),
            PodReportItem::Applied(version) => What::Applied(raw::Applied { version }),
            PodReportItem::DrainAck(uid) => What::Avoided(raw_drain_ack(uid, false)),
            PodReportItem::DrainAckRemoved(uid) => What::Avoided(raw_drain_ack(uid, true)),
            PodReportItem::RoutedServicesAnnounced => {
                What::Avoided(raw_routed_service(ALL_ROUTED_SERVICES.into(), false))
            }
            PodReportItem::AwaitedServicesAnnounced => What::Avoided(raw::Avoided {
                names_awaited: true,
                ..raw_routed_service(String::new(), false)
            }),
            PodReportItem::RoutedService(name) => {
                What::Avoided(raw_routed_service(name.to_string(), false))
            }
            PodReportItem::RoutedServiceRemoved(name) => {
                What::Avoided(raw_routed_service(name.to_string(), true))
            }
            PodReportItem::PassedOver(uid) => What::Avoided(raw_passed_over(uid, false)),
            PodReportItem::PassedOverRemoved(uid) => What::Avoided(raw_passed_over(uid, true)),
            PodReportItem::Synced => What::Synced(raw::Empty {}),
        };
        Self { what: Some(what) }
    }
}

/// Value in the place of a service's name: the sender will name all of its services.
const ALL_ROUTED_SERVICES: &str = "*";

/// Value in the place of a pod's uid. Earlier releases refuse an item without one, and ignore one that they do not know.
const NO_UID: &str = "-";

fn raw_drain_ack(uid: String, ended: bool) -> raw::Avoided {
    raw::Avoided { uid, ended, ..raw::Avoided::default() }
}

fn raw_routed_service(routed: String, ended: bool) -> raw::Avoided {
    raw::Avoided { uid: NO_UID.into(), ended, routed, ..raw::Avoided::default() }
}

fn raw_passed_over(passed_over: String, ended: bool) -> raw::Avoided {
    raw::Avoided { uid: NO_UID.into(), ended, passed_over, ..raw::Avoided::default() }
}

impl TryFrom<raw::PodSeen> for PodObservation {
    type Error = WireError;
    fn try_from(message: raw::PodSeen) -> WireResult<Self> {
        let address = parse_socket_address("pod_seen.address", &message.address, message.port)?;
        // A replica of the controller turns this into a ready pod of the table, which must have an address.
        if message.ready && (address.is_none() || !message.listening) {
            return Err(WireError::new(
                "pod_seen.ready",
                true,
                "a ready pod listens and has an address",
            ));
        }
        Ok(Self {
            uid: require_nonempty("pod_seen.uid", message.uid)?,
            address,
            other_family_address: parse_optional_address("pod_seen.also", &message.also)?,
            listening: message.listening,
            ready: message.ready,
            drained: message.drained,
            in_flight: message.in_flight,
            listening_since_ns: message.listening_since_ns,
            not_ready_reason: message.trouble,
            counts_all_ports: message.counts_all_ports,
            standby: message.standby.map(Into::into),
            awaits_stop: message.awaits_stop,
        })
    }
}

impl From<PodObservation> for raw::PodSeen {
    fn from(value: PodObservation) -> Self {
        Self {
            uid: value.uid,
            address: value.address.map(|at| address_octets(at.ip())).unwrap_or_default(),
            port: value.address.map_or(0, |at| at.port().into()),
            listening: value.listening,
            ready: value.ready,
            drained: value.drained,
            in_flight: value.in_flight,
            listening_since_ns: value.listening_since_ns,
            trouble: value.not_ready_reason,
            also: value.other_family_address.map(address_octets).unwrap_or_default(),
            counts_all_ports: value.counts_all_ports,
            standby: value.standby.map(Into::into),
            awaits_stop: value.awaits_stop,
        }
    }
}
