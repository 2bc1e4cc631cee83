//! Pure: division of a large batch of the RouteTable into slices, between which requests are served.

use std::collections::BTreeMap;

use common::{
    link::RouteChanges,
    wire::{NamespacedName, RouteChange, RouteKey, ServiceEntry},
};

/// Number of changes up to which a batch is applied at once, and from which a slice is full. Each takes some
/// microseconds.
pub(super) const MAX_SLICE_CHANGES: usize = 128;

/// Divides the changes of a batch into slices, in the order in which they are to be applied. Each subject is in one of
/// them.
///
/// A slice may be larger than `max_changes`, since it has all of what belongs together:
///
/// - a Revision and its pods, but for removals
/// - services that are found by other names than before, with reserved hosts, rules of the Gateway API and activators
///
/// Other services come alone, and before those: a wildcard among the names must not get the requests of a host whose own
/// service is still to come. `comes_alone` returns true for them. Revisions come before the services that name them, and
/// go after them.
pub(super) fn divide_changes(
    changes: RouteChanges,
    max_changes: usize,
    comes_alone: impl Fn(&ServiceEntry) -> bool,
) -> Vec<RouteChanges> {
    if changes.len() <= max_changes {
        return vec![changes];
    }
    let mut by_revision = BTreeMap::<NamespacedName, RouteChanges>::new();
    let [mut names, mut services, mut removals] = [(); 3].map(|()| RouteChanges::new());
    for (key, change) in changes {
        let part = match &change {
            RouteChange::Revision(it) => by_revision.entry(it.name.clone()).or_default(),
            RouteChange::Pod(it) => by_revision.entry(it.revision.clone()).or_default(),
            RouteChange::Service(it) if comes_alone(it) => &mut services,
            RouteChange::Removed(RouteKey::Revision(_) | RouteKey::Pod(_)) => &mut removals,
            _ => &mut names,
        };
        part.insert(key, change);
    }
    let alone = |changes: RouteChanges| changes.into_iter().map(|it| [it]);
    let mut slices = pack(by_revision.into_values(), max_changes);
    slices.extend(pack(alone(services), max_changes));
    slices.extend((!names.is_empty()).then_some(names));
    slices.extend(pack(alone(removals), max_changes));
    slices
}

/// Packs groups of changes into slices, of which each but the last one has at least `max_changes` changes.
fn pack<G>(groups: impl Iterator<Item = G>, max_changes: usize) -> Vec<RouteChanges>
where
    G: IntoIterator<Item = (RouteKey, RouteChange)>,
{
    let (mut slices, mut open) = (Vec::new(), RouteChanges::new());
    for group in groups {
        // Not `append`, which moves all changes of the slice for each group.
        open.extend(group);
        if open.len() >= max_changes {
            slices.push(std::mem::take(&mut open));
        }
    }
    slices.extend((!open.is_empty()).then_some(open));
    slices
}

#[cfg(test)]
mod tests {
    use common::{fixtures, wire::RoutingPhase};

    use super::*;

    fn name(number: usize) -> NamespacedName {
        NamespacedName::new("default", format!("s{number:03}"))
    }

    fn with_keys(changes: impl IntoIterator<Item = RouteChange>) -> RouteChanges {
        changes.into_iter().filter_map(|change| Some((change.key()?, change))).collect()
    }

    fn service(number: usize) -> RouteChange {
        RouteChange::Service(fixtures::service(&name(number), &name(number)))
    }

    fn revision(number: usize) -> RouteChange {
        RouteChange::Revision(fixtures::revision(&name(number), "s"))
    }

    /// Pod of a Revision; the uids of its pods are far from each other in the order of keys.
    fn pod(revision: usize, number: usize) -> RouteChange {
        let uid = format!("{number}-{revision}");
        RouteChange::Pod(fixtures::pod(&uid, &name(revision), RoutingPhase::Ready).into())
    }

    fn removal(key: RouteKey) -> RouteChange {
        RouteChange::Removed(key)
    }

    #[test]
    fn a_small_batch_is_one_slice() {
        let changes = with_keys([service(1), revision(1), pod(1, 1)]);
        assert_eq!(divide_changes(changes.clone(), 3, |_| true), std::slice::from_ref(&changes));
        assert_eq!(divide_changes(changes, 2, |_| true).len(), 2);
        assert_eq!(divide_changes(RouteChanges::new(), 3, |_| true), [RouteChanges::new()]);
    }

    #[test]
    fn revisions_come_before_services_and_go_after_them() {
        let gone: Vec<RouteChange> = (30..35)
            .flat_map(|it| [RouteKey::Revision(name(it)), RouteKey::Pod(it.to_string())])
            .map(removal)
            .collect();
        let left = removal(RouteKey::Service(name(29)));
        let host = RouteChange::ReservedHost("a.test".to_owned());
        let all = (0..20).flat_map(|it| [service(it), revision(it)]);
        let changes = with_keys(all.chain(gone.clone()).chain([left.clone(), host.clone()]));
        // Services below 15 are found by the same names as before.
        let slices = divide_changes(changes.clone(), 5, |it| it.name < name(15));
        let expected: Vec<RouteChanges> = (0..4)
            .map(|at| with_keys((at * 5..at * 5 + 5).map(revision)))
            .chain((0..3).map(|at| with_keys((at * 5..at * 5 + 5).map(service))))
            .chain([with_keys((15..20).map(service).chain([left, host]))])
            .chain(
                with_keys(gone)
                    .into_iter()
                    .collect::<Vec<_>>()
                    .chunks(5)
                    .map(|it| it.iter().cloned().collect()),
            )
            .collect();
        assert_eq!(slices, expected);
        let total: RouteChanges = slices.into_iter().flatten().collect();
        assert_eq!(total, changes, "each subject is in one slice");
    }

    #[test]
    fn a_revision_and_its_pods_are_in_one_slice() {
        let all = (0..30).flat_map(|it| [revision(it), pod(it, 1), pod(it, 2), pod(it, 3)]);
        let slices = divide_changes(with_keys(all), 10, |_| true);
        assert_eq!(slices.iter().map(RouteChanges::len).collect::<Vec<_>>(), [12; 10]);
        for slice in slices {
            let counts = slice.values().fold(BTreeMap::new(), |mut counts, change| {
                let revision = match change {
                    RouteChange::Revision(it) => &it.name,
                    RouteChange::Pod(it) => &it.revision,
                    other => panic!("{other:?}"),
                };
                *counts.entry(revision).or_insert(0) += 1;
                counts
            });
            assert_eq!(counts.into_values().collect::<Vec<_>>(), [4; 3]);
        }
    }
}
