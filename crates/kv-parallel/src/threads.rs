//! Ranks as threads of one process, for tests and for CPUs.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use burn::tensor::{DType, Tensor, TensorData};

use crate::collective::Collective;
use crate::{ParallelError, Result, Shard};

/// One rank of a group of threads. The ranks add through the host's memory, in the order of their
/// ranks, in f32. A rank that is dropped ends the group: the others' next sum is an error.
#[derive(Debug)]
pub struct Threads {
    shard: Shard,
    exchange: Arc<Exchange>,
    patience: Duration,
}

#[derive(Debug)]
struct Exchange {
    round: Mutex<Round>,
    changed: Condvar,
}

/// One sum. It fills with the ranks' parts, is added by the rank that comes last, and is empty
/// again once all ranks have read it.
#[derive(Debug)]
struct Round {
    parts: Vec<Option<Vec<f32>>>,
    sum: Option<Sum>,
    /// The first rank that has left.
    left: Option<usize>,
}

#[derive(Debug)]
struct Sum {
    numbers: Arc<Vec<f32>>,
    readers: usize,
}

impl Threads {
    /// A group of `world` ranks, which wait for each other for at most `patience`.
    ///
    /// # Errors
    /// [`ParallelError::Rank`] for a group without ranks.
    pub fn group(world: usize, patience: Duration) -> Result<Vec<Self>> {
        let round = Round { parts: vec![None; world], sum: None, left: None };
        let exchange = Arc::new(Exchange { round: Mutex::new(round), changed: Condvar::new() });
        let ranks = 0..world.max(1);
        ranks
            .map(|rank| {
                let shard = Shard::new(rank, world)?;
                Ok(Self { shard, exchange: Arc::clone(&exchange), patience })
            })
            .collect()
    }

    /// Adds the numbers of all ranks.
    fn add(&self, own: Vec<f32>) -> Result<Arc<Vec<f32>>> {
        let rank = self.shard.rank();
        let until = Instant::now() + self.patience;
        // The round before may still be read.
        let mut round = self.wait(self.lock(), until, |round| round.sum.is_none())?;
        if let Some(other) = round.parts.iter().flatten().next()
            && other.len() != own.len()
        {
            let (expected, actual) = (other.len(), own.len());
            return Err(ParallelError::UnequalParts { rank, expected, actual });
        }
        round.parts[rank] = Some(own);
        if round.parts.iter().all(Option::is_some) {
            let numbers = Arc::new(sum(round.parts.iter_mut().filter_map(Option::take)));
            round.sum = Some(Sum { numbers, readers: self.shard.world() });
            self.exchange.changed.notify_all();
        }
        let mut round = self.wait(round, until, |round| round.sum.is_some())?;
        let Some(sum) = &mut round.sum else { return Err(self.late(&round)) };
        sum.readers -= 1;
        let numbers = Arc::clone(&sum.numbers);
        if sum.readers == 0 {
            round.sum = None;
            self.exchange.changed.notify_all();
        }
        Ok(numbers)
    }

    fn lock(&self) -> MutexGuard<'_, Round> {
        self.exchange.round.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until the round is `ready`.
    fn wait<'a>(
        &self,
        mut round: MutexGuard<'a, Round>,
        until: Instant,
        ready: impl Fn(&Round) -> bool,
    ) -> Result<MutexGuard<'a, Round>> {
        loop {
            if ready(&round) {
                return Ok(round);
            }
            if let Some(rank) = round.left {
                return Err(ParallelError::RankLeft { rank, world: self.shard.world() });
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(self.late(&round));
            }
            let waited = self.exchange.changed.wait_timeout(round, left);
            round = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn late(&self, round: &Round) -> ParallelError {
        let present = round.parts.iter().flatten().count();
        ParallelError::TimedOut { present, world: self.shard.world(), waited: self.patience }
    }
}

impl Collective for Threads {
    fn shard(&self) -> Shard {
        self.shard
    }

    fn all_reduce(&self, tensor: Tensor<2>) -> Result<Tensor<2>> {
        if !self.shard.is_part() {
            return Ok(tensor);
        }
        through_host(tensor, |numbers| Ok(self.add(numbers)?.to_vec()))
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.lock().left.get_or_insert(self.shard.rank());
        self.exchange.changed.notify_all();
    }
}

/// Adds the ranks' numbers in the order of ranks.
pub(crate) fn sum(parts: impl Iterator<Item = Vec<f32>>) -> Vec<f32> {
    parts
        .reduce(|mut sum, part| {
            sum.iter_mut().zip(part).for_each(|(sum, part)| *sum += part);
            sum
        })
        .unwrap_or_default()
}

/// Changes a tensor's numbers on the host, in f32.
pub(crate) fn through_host(
    tensor: Tensor<2>,
    change: impl FnOnce(Vec<f32>) -> Result<Vec<f32>>,
) -> Result<Tensor<2>> {
    let unreadable = |reason: String| ParallelError::Unreadable { reason };
    let (shape, dtype, device) = (tensor.dims(), tensor.dtype(), tensor.device());
    let data = tensor.cast(DType::F32).try_into_data().map_err(|e| unreadable(e.to_string()))?;
    let numbers = data.try_into_vec::<f32>().map_err(|error| unreadable(format!("{error:?}")))?;
    let data = TensorData::new(change(numbers)?, shape);
    Ok(Tensor::from_data(data, (&device, dtype)))
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(10);

    fn on_all<T: Send>(ranks: Vec<Threads>, work: impl Fn(Threads) -> T + Sync) -> Vec<T> {
        let work = &work;
        thread::scope(|scope| {
            let all: Vec<_> =
                ranks.into_iter().map(|rank| scope.spawn(move || work(rank))).collect();
            all.into_iter().map(|one| one.join().unwrap()).collect()
        })
    }

    #[test]
    fn every_rank_gets_the_sum_of_every_round() {
        let device = burn::tensor::Device::flex();
        for world in [1, 2, 4] {
            let sums = on_all(Threads::group(world, PATIENCE).unwrap(), |rank| {
                let own = rank.shard().rank() as f32;
                let sum = |round: usize| {
                    let tensor = Tensor::<2>::full([2, 3], own + round as f32, &device);
                    rank.all_reduce(tensor).unwrap().into_data().try_into_vec::<f32>().unwrap()
                };
                (0..100).map(sum).collect::<Vec<_>>()
            });
            for sums in sums {
                for (round, sum) in sums.into_iter().enumerate() {
                    let expected = (world * (world - 1) / 2 + world * round) as f32;
                    assert_eq!(sum, [expected; 6]);
                }
            }
        }
    }

    #[test]
    fn a_rank_that_leaves_ends_the_others() {
        let device = burn::tensor::Device::flex();
        let begun = Instant::now();
        let results = on_all(Threads::group(3, PATIENCE).unwrap(), |rank| {
            let one = || Tensor::<2>::ones([1, 4], &device);
            rank.all_reduce(one()).unwrap();
            if rank.shard().rank() == 1 {
                return Ok(());
            }
            rank.all_reduce(one()).map(|_| ())
        });
        let left = Err(ParallelError::RankLeft { rank: 1, world: 3 });
        assert_eq!(results[1], Ok(()));
        // The second one to notice may see that the first one has left, too.
        assert!(results.contains(&left), "{results:?}");
        assert!([0, 2].iter().all(|&rank| results[rank].is_err()), "{results:?}");
        assert!(begun.elapsed() < PATIENCE);
    }

    #[test]
    fn a_rank_that_does_not_come_is_not_waited_for_forever() {
        let device = burn::tensor::Device::flex();
        let ranks = Threads::group(2, Duration::from_millis(50)).unwrap();
        let late = ranks[0].all_reduce(Tensor::<2>::ones([1, 1], &device)).map(|_| ());
        let waited = Duration::from_millis(50);
        assert_eq!(late, Err(ParallelError::TimedOut { present: 1, world: 2, waited }));
    }

    #[test]
    fn tensors_of_other_sizes_are_refused() {
        let device = burn::tensor::Device::flex();
        let results = on_all(Threads::group(2, PATIENCE).unwrap(), |rank| {
            let own = rank.shard().rank() + 1;
            rank.all_reduce(Tensor::<2>::ones([1, own], &device)).map(|_| ())
        });
        let unequal = |error: &Result<()>| matches!(error, Err(ParallelError::UnequalParts { .. }));
        assert!(results.iter().any(unequal), "{results:?}");
        assert!(results.iter().all(Result::is_err), "{results:?}");
    }
}
