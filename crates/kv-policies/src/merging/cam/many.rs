//! Many victims at once: a prompt's, or those that several steps have left. They are chosen on the
//! host; values stay on the device.

use burn::tensor::{DType, Int, Tensor};
use kv_core::{LayerCache, Selection, rank, read_f32, read_i32};
use kv_kernels::{KeyRule, MergeLists, MergeOptions, NO_SLOT, SlotLists, merge_slots};

use super::{Cam, Candidates, NAME, SEEDS};
use crate::policy::sentinels::LOG_OF_NO_SCORE;
use crate::{Observation, PolicyError, Result};

/// One head's tokens in the order of their positions.
struct Line {
    /// Whether each token stays.
    stays: Vec<bool>,
    /// Whether each token may be spread.
    candidates: Vec<bool>,
    attention: Vec<f32>,
    uniforms: Vec<f32>,
    /// Rows of the values that they are read from.
    rows: Vec<usize>,
    /// Slots of the tokens that stay.
    slots: Vec<usize>,
}

/// A victim that is spread.
struct Spread {
    row: usize,
    /// The first survivor behind the victim, as an index among survivors.
    first: usize,
    share: f32,
}

impl Cam {
    /// Spreads a prompt's victims. `attention` is `[B * Hkv * T]`.
    pub(super) fn spread_prompt(
        &self,
        cache: &mut LayerCache,
        observation: &Observation<'_>,
        selection: &Selection,
        attention: &[f32],
        uniform: impl Fn(usize, usize) -> f32,
    ) -> Result<()> {
        let [batch, kv_heads, tokens, head_dim] = observation.dims();
        let total_kv_heads = batch * kv_heads;
        if selection.total() == total_kv_heads * tokens {
            return Ok(());
        }
        let scores = match self.options.candidates {
            Candidates::Most(_) => match self.evictor.rank(observation)? {
                Some((scores, _)) => Some(read_f32("scores", scores)?),
                None => Some(attention.to_vec()),
            },
            Candidates::All(_) => None,
        };
        let offsets = cache.layout().offsets().to_vec();
        let lines = selection.kept()?.iter().enumerate().map(|(range, kept)| {
            let mut stays = vec![false; tokens];
            kept.iter().for_each(|&token| stays[token as usize] = true);
            let own = range * tokens..(range + 1) * tokens;
            let scores = scores.as_ref().map(|scores| &scores[own.clone()]);
            Line {
                candidates: self.candidates(&stays, scores),
                attention: attention[own.clone()].to_vec(),
                uniforms: (0..tokens).map(|token| uniform(range, token)).collect(),
                rows: own.collect(),
                slots: (offsets[range]..offsets[range] + kept.len()).collect(),
                stays,
            }
        });
        let lines: Vec<Line> = lines.collect();
        let values = observation.values.clone().reshape([total_kv_heads * tokens, head_dim]);
        self.spread_lines(cache, &values, &lines)
    }

    /// Spreads all slots but the kept ones. `attention` is `[S]`.
    pub(super) fn spread_others(
        &self,
        cache: &mut LayerCache,
        kept: &Selection,
        attention: Tensor<1>,
    ) -> Result<()> {
        let attention = read_f32("attention", attention)?;
        let positions = cache.read_positions()?;
        let missing = PolicyError::MissingObservation { policy: NAME, what: "a prompt" };
        let seeds = read_i32("seeds", cache.int_state(SEEDS).ok_or(missing)?.clone())?;
        let lines = kept.kept()?.iter().enumerate().map(|(range, kept)| {
            let live = cache.layout().live(range);
            let mut rows: Vec<usize> = live.clone().collect();
            rows.sort_by_key(|&slot| positions[slot]);
            let mut stay = vec![false; live.len()];
            kept.iter().for_each(|&at| stay[at as usize] = true);
            let stays: Vec<bool> = rows.iter().map(|slot| stay[slot - live.start]).collect();
            let seed = [seeds[2 * range] as u32, seeds[2 * range + 1] as u32];
            let uniform = |&slot: &usize| kv_kernels::uniform(seed, positions[slot] as u32);
            Line {
                candidates: vec![true; stays.len()],
                attention: rows.iter().map(|&slot| attention[slot]).collect(),
                uniforms: rows.iter().map(uniform).collect(),
                slots: rows.iter().copied().zip(&stays).filter(|x| *x.1).map(|x| x.0).collect(),
                rows,
                stays,
            }
        });
        let lines: Vec<Line> = lines.collect();
        let values = cache.values().clone();
        self.spread_lines(cache, &values, &lines)
    }

    /// Which victims may be spread: the best scored, the later ones among equals.
    fn candidates(&self, stays: &[bool], scores: Option<&[f32]>) -> Vec<bool> {
        let (Candidates::Most(most), Some(scores)) = (self.options.candidates, scores) else {
            return vec![true; stays.len()];
        };
        let reversed: Vec<f32> = scores.iter().rev().copied().collect();
        let ranked = rank(&reversed).into_iter().map(|at| stays.len() - 1 - at as usize);
        let mut candidates = vec![false; stays.len()];
        ranked.filter(|&at| !stays[at]).take(most).for_each(|at| candidates[at] = true);
        candidates
    }

    /// The victims of one head that are spread.
    fn spreads(&self, line: &Line) -> Vec<Spread> {
        let own = line.stays.iter().zip(&line.attention).filter(|(stays, _)| **stays);
        let mut sums = vec![0.0f64];
        sums.extend(own.scan(0.0, |sum, (_, attention)| {
            *sum += f64::from(*attention);
            Some(*sum)
        }));
        let survivors = sums.len() - 1;
        let (mut first, mut spreads) = (0, Vec::new());
        for (at, &stays) in line.stays.iter().enumerate() {
            if stays {
                first += 1;
                continue;
            }
            let last = survivors.min(first + self.options.spread);
            if first == last || !line.candidates[at] {
                continue;
            }
            let compared = if self.options.official { survivors } else { last };
            let mean = (sums[compared] - sums[first]) / (compared - first) as f64;
            // u < A / mean, where 0 of 0 is 0.
            if f64::from(line.uniforms[at]) * mean < f64::from(line.attention[at]) {
                let receive =
                    if self.options.official { self.options.spread } else { last - first };
                spreads.push(Spread { row: line.rows[at], first, share: 1.0 / receive as f32 });
            }
        }
        spreads
    }

    /// Adds shares of the victims' values `[N, D]` to the survivors' values.
    fn spread_lines(
        &self,
        cache: &mut LayerCache,
        values: &Tensor<2>,
        lines: &[Line],
    ) -> Result<()> {
        let spreads: Vec<Vec<Spread>> = lines.iter().map(|line| self.spreads(line)).collect();
        let most = spreads.iter().map(Vec::len).max().unwrap_or_default();
        let survivors = lines.iter().map(|line| line.slots.len()).max().unwrap_or_default();
        if most == 0 {
            return Ok(());
        }
        let (total_kv_heads, head_dim) = (lines.len(), cache.head_dim());
        let device = cache.options().device.clone();
        let ints = |values: Vec<i32>| {
            Tensor::<1, Int>::from_data(values.as_slice(), (&device, DType::I32))
        };
        let padded = |of: &dyn Fn(&Spread) -> i32, none: i32| {
            let rows = spreads.iter().flat_map(|own| {
                let own = own.iter().map(of);
                own.chain(std::iter::repeat(none)).take(most).collect::<Vec<i32>>()
            });
            ints(rows.collect())
        };
        let weights = |weights: Vec<f32>, width: usize| {
            Tensor::<1>::from_data(weights.as_slice(), (&device, DType::F32)).reshape([
                total_kv_heads,
                width,
                2,
            ])
        };
        let shares = spreads.iter().flat_map(|own| {
            let own = own.iter().flat_map(|spread| [spread.share.ln(), 0.0]);
            own.chain(std::iter::repeat(0.0)).take(2 * most).collect::<Vec<f32>>()
        });
        let list = |width: usize, counts: Vec<usize>| SlotLists {
            slots: ints((0..(total_kv_heads * width) as i32).collect())
                .reshape([total_kv_heads, width]),
            counts: ints(counts.into_iter().map(|count| count as i32).collect()),
        };
        // Victims whose first survivor is one slot are averaged there, weighted by their shares and
        // in their order, so that sums are reproducible.
        let rows = values.clone().select(0, padded(&|spread| spread.row as i32, 0));
        let rows = rows.cast(DType::F32);
        let lists = MergeLists {
            victims: list(most, spreads.iter().map(Vec::len).collect()),
            targets: padded(&|spread| spread.first as i32, NO_SLOT).reshape([total_kv_heads, most]),
            victim_weights: weights(shares.collect(), most),
            kept: list(survivors, lines.iter().map(|line| line.slots.len()).collect()),
            kept_weights: weights(
                [LOG_OF_NO_SCORE, 0.0].repeat(total_kv_heads * survivors),
                survivors,
            ),
        };
        let zeros =
            || Tensor::<2>::zeros([total_kv_heads * survivors, head_dim], (&device, DType::F32));
        let (mut keys, mut begin) = (zeros(), zeros());
        let options = MergeOptions { rule: KeyRule::Mean, ..Default::default() };
        let merged = merge_slots(Some([&rows, &rows]), [&mut keys, &mut begin], &lists, &options)
            .map_err(kv_core::Error::from)?;
        let totals = merged.weights.narrow(2, 0, 1).exp();
        let begin = begin.reshape([total_kv_heads, survivors, head_dim]) * totals;
        // A survivor gets the sums of its own slot and of the `spread - 1` survivors before it.
        let reach = self.options.spread.min(survivors);
        let mut sums = begin.clone();
        for shift in 1..reach {
            let before = Tensor::zeros([total_kv_heads, shift, head_dim], (&device, DType::F32));
            sums =
                sums + Tensor::cat(vec![before, begin.clone().narrow(1, 0, survivors - shift)], 1);
        }
        let slots = lines.iter().flat_map(|line| {
            let slots = line.slots.iter().map(|&slot| slot as i32);
            slots.chain(std::iter::repeat(-1)).take(survivors).collect::<Vec<i32>>()
        });
        let slots = ints(slots.collect());
        Ok(cache.add_values(&slots, sums.reshape([total_kv_heads * survivors, head_dim]))?)
    }
}
