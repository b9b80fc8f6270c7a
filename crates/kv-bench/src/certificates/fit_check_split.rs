//! Splits prompts by length into prompts that the constants of bounds are fitted to, and prompts
//! that the bounds are checked on.

/// The least length of a prompt in a class, over the length of the longest prompt there.
const ALIKE: f64 = 0.9;

/// The part of a prompt where bounds have constants: constants are fitted to it, or bounds are
/// checked on it.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct FitCheck {
    /// The class of prompts of about this length. Attention falls with distance in another way at
    /// other lengths, so that each class has constants of its own.
    pub(crate) class: usize,
    pub(crate) fits: bool,
    pub(crate) checks: bool,
}

impl FitCheck {
    /// Splits prompts of so many tokens. In the order of their lengths, longest first, the prompts
    /// of a class alternate: fitted, checked, fitted. A prompt that is alone at its length joins
    /// the class of the next longer prompts and is checked there; if it is the longest, the next
    /// shorter prompt joins its class. A single prompt is both fitted and checked.
    pub(crate) fn of(lengths: &[usize]) -> Vec<Self> {
        let alike = |prompt: usize, class: &[usize]| {
            lengths[prompt] as f64 >= ALIKE * lengths[class[0]] as f64
        };
        let mut by_length: Vec<usize> = (0..lengths.len()).collect();
        by_length.sort_by_key(|prompt| std::cmp::Reverse(lengths[*prompt]));
        let mut classes: Vec<Vec<usize>> = Vec::new();
        for (rank, &prompt) in by_length.iter().enumerate() {
            let last = rank + 1 == lengths.len();
            match classes.last_mut() {
                Some(class) if last || class.len() < 2 || alike(prompt, class) => {
                    class.push(prompt)
                }
                _ => classes.push(vec![prompt]),
            }
        }
        let mut fit_checks = vec![Self { class: 0, fits: true, checks: true }; lengths.len()];
        for (class, prompts) in classes.iter().enumerate().filter(|_| lengths.len() > 1) {
            for (rank, &prompt) in prompts.iter().enumerate() {
                let fits = rank % 2 == 0 && alike(prompt, prompts);
                fit_checks[prompt] = Self { class, fits, checks: !fits };
            }
        }
        fit_checks
    }
}

#[cfg(test)]
mod tests {
    use super::FitCheck;

    #[test]
    fn prompts_of_a_length_are_fitted_to_and_checked() {
        let of = |lengths: &[usize]| -> Vec<(usize, bool, bool)> {
            FitCheck::of(lengths).into_iter().map(|own| (own.class, own.fits, own.checks)).collect()
        };
        let (fit, check) = (|class| (class, true, false), |class| (class, false, true));
        assert_eq!(of(&[100, 95, 205, 200, 92]), [fit(1), check(1), fit(0), check(0), fit(1)]);
        // None is left alone.
        assert_eq!(of(&[100, 400, 390, 50]), [fit(1), fit(0), check(0), check(1)]);
        assert_eq!(of(&[400, 390, 50]), [fit(0), check(0), check(0)]);
        assert_eq!(of(&[10]), [(0, true, true)]);
    }
}
