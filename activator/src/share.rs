//! Pure: which of a revision's pods are this activator's, where a hard limit holds.
//!
//! Activators do not know of each other's requests, so each gives requests only to pods of its own; the rule is Knative's
//! (`assignSlice` in knative/serving `pkg/activator/net/throttler.go`).

/// This activator's place among those that share a revision's pods.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// From 0. At or above `of`: it is none of them, but may be asked all the same, and then knows all pods.
    pub index: u32,
    /// How many there are.
    pub of: u32,
}

impl Part {
    /// The only one.
    pub const WHOLE: Self = Self { index: 0, of: 1 };

    /// The place of `own` in `all`.
    pub fn find<T: AsRef<str>>(own: &str, all: impl IntoIterator<Item = T>) -> Self {
        let (mut index, mut of) = (u32::MAX, 0);
        for name in all {
            if name.as_ref() == own {
                index = of;
            }
            of += 1;
        }
        Self { index, of }
    }

    /// The pods of this part, out of all of them in an order that every activator keeps.
    ///
    /// Example: of 5 pods, the first of two activators has pods 0, 1 and 4, the second 2 and 3.
    pub fn of_pods<T: Clone>(self, pods: &[T]) -> Vec<T> {
        let (count, index, of) = (pods.len(), size(self.index), size(self.of));
        if index >= of || count == 0 {
            return pods.to_vec();
        }
        if of > count {
            return vec![pods[index % count].clone()];
        }
        let (slice, rest) = (count / of, count % of);
        let mut own = pods[index * slice..(index + 1) * slice].to_vec();
        if index < rest {
            own.push(pods[count - rest + index].clone());
        }
        own
    }

    /// Requests this activator may have at once at a pod of its part, where a pod may have `limit`: activators that
    /// share a pod divide it. At least one, since somebody who is asked has to answer: more activators than
    /// pods times limit go beyond it.
    pub fn of_limit(self, limit: u32, pods: usize) -> u32 {
        let (pods, of) = (u32::try_from(pods).unwrap_or(u32::MAX), self.of);
        if limit == 0 || pods == 0 || of <= pods || self.index >= of {
            return limit;
        }
        let (own, rank) = (self.index % pods, self.index / pods);
        let sharers = of / pods + u32::from(own < of % pods);
        (limit / sharers + u32::from(rank < limit % sharers)).max(1)
    }
}

fn size(value: u32) -> usize {
    usize::try_from(value).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pods_are_cut_into_slices_and_the_first_get_what_is_left_over() {
        let part = |index| Part { index, of: 2 }.of_pods(&[0, 1, 2, 3, 4]);
        assert_eq!((part(0), part(1)), (vec![0, 1, 4], vec![2, 3]));
    }

    #[test]
    fn activators_beyond_the_pods_share_them_and_their_limit() {
        let parts = (0..3).map(|index| Part { index, of: 3 });
        assert_eq!(parts.clone().map(|it| it.of_pods(&['a', 'b'])[0]).collect::<String>(), "aba");
        assert_eq!(parts.map(|it| it.of_limit(5, 2)).collect::<Vec<_>>(), [3, 5, 2]);
    }

    #[test]
    fn who_has_no_part_knows_all_pods() {
        let stranger = Part::find("c", ["a", "b"]);
        assert_eq!(stranger.of_pods(&[1, 2, 3]), [1, 2, 3]);
        assert_eq!(stranger.of_limit(7, 3), 7);
        assert_eq!(Part::find("b", ["a", "b"]), Part { index: 1, of: 2 });
    }

    proptest! {
        /// With no more activators than pods, each pod is exactly one's; otherwise limits add up to each pod's own.
        #[test]
        fn every_pod_is_somebodys(pods in 1usize..40, of in 1u32..40, limit in 40u32..200) {
            let all: Vec<usize> = (0..pods).collect();
            let mut carried = vec![0; pods];
            for index in 0..of {
                let part = Part { index, of };
                for pod in part.of_pods(&all) {
                    carried[pod] += part.of_limit(limit, pods);
                }
            }
            prop_assert_eq!(carried, vec![limit; pods]);
        }
    }
}
